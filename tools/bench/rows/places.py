"""The benchmarks of `observe(what="time")`: what the readings cost, and how close the times of places are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from tools.bench.row import Row, compare, measure_together
from tools.bench.timing import Counter

LAYERS, WIDTH, TOKENS = 12, 64, 160
LENGTH, SIZE = 100, 256


def _layer(weights: dict[str, Any], x: Any) -> Any:
    query, key, value = (x @ weights[name] for name in ("query", "key", "value"))
    x = x + jax.nn.softmax(query @ key.T / WIDTH**0.5) @ value @ weights["out"]
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def _loss(weights: list[dict[str, Any]], x: Any) -> Any:
    for i, each in enumerate(weights):
        with jax.named_scope(f"layers/{i}"):
            x = _layer(each, x)
    return jnp.mean(x**2)


@jax.jit
def _step(weights: list[dict[str, Any]], x: Any) -> Any:
    loss, slopes = jax.value_and_grad(_loss)(weights, x)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, weights, slopes), loss


def _weights() -> list[dict[str, Any]]:
    shapes = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(shapes)))
    return [
        {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]


def transformer_step(rounds: int) -> Row:
    """A training step of a transformer of which each layer is a place, forward and backward."""
    arguments = _weights(), jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))

    count = Counter()

    def per_step(steps: int = 8) -> float:
        begun = perf_counter()
        for _ in range(steps):
            out = _step(*arguments)
        jax.block_until_ready(out)
        return (perf_counter() - begun) / steps * 1e3

    def timed() -> float:
        with hcb.observe(where="layers/*", what="time", tap_func=count):
            return per_step()

    name = "a training step of a transformer with the time of each of its 12 layers"
    return compare(name, "ms/step", timed, per_step, "the unwatched step", 1.15, rounds)


def known_work(rounds: int) -> list[Row]:
    """Two places that are all of an iteration of a scan, against the same code alone, and against the program."""
    w, x = 0.5 * jnp.eye(SIZE), jnp.ones((SIZE, SIZE))
    parts: dict[str, Callable[[Any], Any]] = {
        "first": lambda x: jnp.tanh(x @ w @ w),
        "second": lambda x: jnp.sin(x @ w),
    }

    def both(x: Any, _: Any) -> Any:
        for name, part in parts.items():
            with hcb.span(name):
                x = part(x)
        return x, None

    def scanned(body: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        return partial(jax.jit(lambda x: lax.scan(body, x, None, length=LENGTH)[0]), x)

    program = scanned(both)
    alone = {name: scanned(lambda x, _, part=part: (part(x), None)) for name, part in parts.items()}
    found: list[dict[str, float]] = []

    def take(times: Any) -> None:
        found.append({name: float(np.sum(one["seconds"])) for name, one in times.items()})

    def once() -> list[float]:
        # Of five runs of each, in turn, the fastest; of the program the fastest call.
        found.clear()
        seconds: dict[str, list[float]] = {name: [] for name in alone}
        for _ in range(5):
            with hcb.observe(what="time", tap_func=take):
                program().block_until_ready()
            for name, each in alone.items():
                begun = perf_counter()
                each().block_until_ready()
                seconds[name].append(perf_counter() - begun)
        hcb.barrier_wait()
        pairs = [(min(times[name] for times in found), min(seconds[name])) for name in alone]
        fastest = min(found, key=lambda times: times["program"])
        pairs.append((fastest["program"], fastest["first"] + fastest["second"]))
        return [max(pair) / min(pair) for pair in pairs]

    names = [
        ("the time of a place of two products and of the same code alone: the longer over the shorter", 1.1),
        ("the time of a place of one product and of the same code alone: the longer over the shorter", 1.1),
        ("the time of a program and the sum of its two places: the longer over the shorter", 1.05),
    ]
    figures = measure_together(once, rounds)
    return [each.within(limit, name, "") for each, (name, limit) in zip(figures, names, strict=True)]
