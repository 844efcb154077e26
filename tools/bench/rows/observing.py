"""The benchmarks of what looks at training steps that are not edited, compared with the bare step."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from tools.bench.row import Row, compare, measure, measure_together
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


# ---- Steps of 0.1 to 50 ms, in a block of each feature ---------------------------------------------------------------

TIMED_MS = 15.0
"""How long a side is timed in a round, and at least two steps."""


class Size(NamedTuple):
    """A training step of an MLP, which takes about `ms`."""

    ms: float
    layers: int
    width: int
    batch: int


# XLA's temporary memory of the last one is above 32 MiB with and without taps: glibc takes that from the system in each
# call, which costs a fifth of the step.
SIZES = (Size(0.1, 2, 64, 192), Size(1, 4, 128, 320), Size(10, 6, 384, 512), Size(50, 8, 640, 1000))


def _small_step(weights: list[Any], x: Any) -> Any:
    def loss(weights: list[Any]) -> Any:
        y = x
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                y = jax.nn.relu(y @ w)
        return jnp.mean(jnp.log1p(y) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)], value


def _sized(size: Size) -> tuple[list[Any], Any]:
    keys = jax.random.split(jax.random.key(0), size.layers)
    weights = [jax.random.normal(key, (size.width, size.width)) * (2 / size.width) ** 0.5 for key in keys]
    return weights, jax.random.normal(jax.random.key(1), (size.batch, size.width))


@contextlib.contextmanager
def _features() -> Iterator[dict[str, tuple[Callable[[], Any], float]]]:
    """What makes a context of each feature, and the bound of a call."""
    with tempfile.TemporaryDirectory() as folder, hcb.outfeed_receiver():
        yield {
            "observe": (lambda: hcb.observe(where="layer_*", tap_func=lambda values: None), 1.15),
            "watch_nonfinite": (hcb.watch_nonfinite, 1.05),
            "capsule": (lambda: hcb.capsule(folder, nonfinite=True), 1.05),
            "accelerate": (hcb.accelerate, 1.05),
        }


def _in_context(context: Any, step: Callable[..., Any], arguments: tuple[Any, ...], steps: int) -> float:
    with context:
        jax.block_until_ready(step(*arguments))
        start = perf_counter()
        for _ in range(steps):
            out = step(*arguments)
        jax.block_until_ready(out)
        return (perf_counter() - start) / steps * 1e3


def sized_calls(rounds: int) -> list[Row]:
    """Calls of a jitted step in a block of the feature, until the results are there; the peer is the bare step.

    Three times the rounds of other rows, each of some 15 ms: the bounds are 5 %, less than a round's spread.
    """
    rows = []
    for size in SIZES:
        step, arguments, steps = jax.jit(_small_step), _sized(size), max(2, round(TIMED_MS / size.ms))
        with _features() as features:
            contexts = {name: make() for name, (make, _) in features.items() if name != "accelerate"}
            contexts = {"": contextlib.nullcontext(), **contexts}

            def once(
                contexts: Any = contexts, step: Any = step, arguments: Any = arguments, n: int = steps
            ) -> list[float]:
                times = [_in_context(context, step, arguments, n) for context in contexts.values()]
                return [*times, _in_context(hcb.accelerate(), step, arguments, n)]

            bare, *found = measure_together(once, 3 * rounds)
            hcb.barrier_wait()
        for (name, (_, bound)), mine in zip(features.items(), found, strict=True):
            rows.append(
                mine.versus(
                    bare, f"a step of {size.ms:g} ms under `{name}`", "ms/step", "the bare step", bound
                )
            )
    return rows


def sized_first_calls(rounds: int) -> list[Row]:
    """The first call of the step of 10 ms: trace, lower, compile, run; the peer is the bare step."""
    arguments = _sized(SIZES[2])

    def first(context: Any) -> float:
        step = jax.jit(lambda weights, x: _small_step(weights, x))
        with context:
            start = perf_counter()
            jax.block_until_ready(step(*arguments))
            return (perf_counter() - start) * 1e3

    with _features() as features:
        makers = [contextlib.nullcontext, *(make for make, _ in features.values())]
        bare, *found = measure([lambda make=make: first(make()) for make in makers], min(rounds, 5))
        hcb.barrier_wait()
    name = "the first call of a step of 10 ms (trace, lower, compile, run) under"
    return [
        mine.versus(bare, f"{name} `{feature}`", "ms", "the bare step", None)
        for feature, mine in zip(features, found, strict=True)
    ]


def sized_diagnosis(rounds: int) -> list[Row]:
    """From a call of a compiled, watched step whose results are not finite to the report; the peer: its first call."""
    rows = []
    for size in SIZES:
        weights, x = _sized(size)
        bad = x.at[0, 0].set(-jnp.inf)
        watching = hcb.watch_nonfinite()

        def once(weights: Any = weights, x: Any = x, bad: Any = bad, watching: Any = watching) -> list[float]:
            step = jax.jit(lambda weights, x: _small_step(weights, x))
            start = perf_counter()
            jax.block_until_ready(step(weights, x))
            compiled = perf_counter() - start
            with watching:
                jax.block_until_ready(step(weights, x))
                hcb.barrier_wait()
                start = perf_counter()
                step(weights, bad)
                found = False
                try:
                    hcb.barrier_wait()
                except* hcb.NonFiniteError:
                    found = True
            assert found
            return [(perf_counter() - start) * 1e3, compiled * 1e3]

        mine, compiled = measure_together(once, min(rounds, 3))
        name = f"from a failing call of a watched step of {size.ms:g} ms to the report"
        rows.append(mine.versus(compiled, name, "ms", "the first call of the bare step", 1.5))
    return rows
