"""The benchmarks of `observe`: statistics of the layers of an MLP, compared with the unwatched training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from tools.bench.row import Row, compare
from tools.bench.separate_process import rows_of_process

LAYERS, WIDTH, BATCH = 50, 512, 128
DEVICES, SHARDED_LAYERS, SHARDED_WIDTH, SHARDED_BATCH = 8, 12, 256, 512


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
    names = {"output": "statistics of 50 layers", "grad": "of the cotangents of 50 layers"}
    return _compared(_arguments(LAYERS, WIDTH, BATCH), names, rounds)


def sharded_step(rounds: int) -> list[Row]:
    """A training step on eight devices under automatic sharding: each has a part of the batch, and all the weights."""
    return rows_of_process("tools.bench.rows.observing", "_on_devices", rounds, devices=DEVICES)


def _on_devices(rounds: int) -> list[Row]:
    mesh = Mesh(jax.devices(), "batch")
    weights, x = _arguments(SHARDED_LAYERS, SHARDED_WIDTH, SHARDED_BATCH)
    placed = (
        jax.device_put(weights, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("batch"))),
    )
    where = "on 8 devices under automatic sharding"
    names = {"output": f"statistics of 12 layers {where}", "grad": f"of the cotangents of 12 layers {where}"}
    return _compared(placed, names, rounds)


def _arguments(layers: int, width: int, batch: int) -> tuple[list[Any], Any]:
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (width, width)) * (2 / width) ** 0.5 for key in keys]
    return weights, jax.random.normal(jax.random.key(1), (batch, width))


def _compared(arguments: tuple[Any, ...], names: dict[str, str], rounds: int) -> list[Row]:
    run = partial(_per_step, arguments=arguments)
    plain, rows = jax.jit(_train_step), []
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
