"""The benchmarks of `observe`: statistics of 50 layers of an MLP, compared with the unwatched training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

import hostcallback as hcb
from tools.bench.row import Row, compare

LAYERS, WIDTH, BATCH = 50, 512, 128


def _loss(weights: list[Any], x: Any) -> Any:
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def _train_step(weights: list[Any], x: Any) -> Any:
    value, grads = jax.value_and_grad(_loss)(weights, x)
    return value, [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)]


def _per_step(step: Callable[..., Any], arguments: tuple[Any, ...], steps: int = 5) -> float:
    start = perf_counter()
    for _ in range(steps):
        out = step(*arguments)
    jax.block_until_ready(out)
    return (perf_counter() - start) / steps * 1e3


def observed_step(rounds: int) -> list[Row]:
    """A training step with seven statistics of each of 50 layers in one message: of activations, of cotangents."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys]
    arguments = (weights, jax.random.normal(jax.random.key(1), (BATCH, WIDTH)))
    run = partial(_per_step, arguments=arguments)
    plain, rows = jax.jit(_train_step), []
    names = {"output": "statistics of 50 layers", "grad": "of the cotangents of 50 layers"}
    for what_of, name in names.items():
        observed = jax.jit(
            hcb.observe(_train_step, where="layer_*", what_of=what_of, tap_func=lambda values: None)
        )
        rows.append(
            compare(
                f"a training step of an MLP under `observe`, {name}", "ms/step",
                partial(run, observed), partial(run, plain), "the unwatched step", 1.15, rounds,
            )
        )  # fmt: skip
    hcb.barrier_wait()
    return rows
