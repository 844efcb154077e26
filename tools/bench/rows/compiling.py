"""The benchmarks of tracing, lowering and compiling programs with taps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

import hostcallback as hcb
from tools.bench.row import Figure, Row, figure, measure, measure_together
from tools.bench.timing import Counter, seconds

TAPS = 1_000


def first_call(rounds: int) -> list[Row]:
    """The cost that each of 1,000 taps of an array adds to the first call: trace, lower, compile and the run.

    Each tap is a separate consumer, as if on a separate line. The array is an argument, so that XLA compiles nothing
    but the calls. Ours is `jax.jit`, the peer `jax.debug.callback` under `jax.jit`.
    """
    mine, theirs = Counter(), Counter()

    def program(tap: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
        def f(x: Any) -> Any:
            for site in range(TAPS):
                tap(x, site)
            return x + 1

        return f

    def first(jit: Any, tap: Callable[[Any, int], Any]) -> float:
        compiled = jit(program(tap))
        gc.collect()  # else the one of the two pays for the other's objects for which a full collection is due
        time = seconds(lambda: compiled(jnp.float32(1)))
        hcb.barrier_wait()
        jax.effects_barrier()
        return time

    def take(count: Counter) -> Callable[..., None]:
        return lambda value, site: count(value)

    def once() -> list[float]:
        ours, peer, bare = take(mine), take(theirs), first(jax.jit, lambda x, site: None)
        tapped = first(jax.jit, lambda x, site: hcb.id_tap(ours, x, site=site))
        called_back = first(jax.jit, lambda x, site: jax.debug.callback(peer, x, site=site, ordered=True))
        return [(t - bare) / TAPS * 1e3 for t in (tapped, called_back)]

    rounds = min(rounds, 5)
    ours, peer = measure_together(once, rounds)
    assert mine.count == theirs.count == TAPS * (rounds + 1)
    name = "each of 1,000 taps in the first call of a program: trace, lower, compile"
    return [
        ours.within(1.0, name, "ms/tap"),
        ours.versus(peer, "the same", "ms/tap", "jax.debug.callback(ordered=True)", 1.0),
    ]


FIRST = """
import sys
from time import perf_counter
import jax
jax.devices()
tapped = sys.argv[1] == "tapped"
began = perf_counter()
if tapped:
    import hostcallback as hcb
    hcb.id_tap, hcb.barrier_wait
imported = perf_counter()
jax.jit(lambda x: hcb.id_tap(len, x * 2) if tapped else x * 2)(jax.numpy.ones(3)).block_until_ready()
if tapped:
    hcb.barrier_wait()
print(1e3 * (imported - began), 1e3 * (perf_counter() - imported))
"""
"""A process that calls a compiled function for the first time: prints the milliseconds of imports and of the call."""


def starting(rounds: int) -> list[Row]:
    """What a process pays once: the imports without those of JAX, and the first tap, until its function has run.

    The same call without a tap is made in other processes, in turn. Each has started JAX's backend before.
    """

    def once(what: str) -> list[float]:
        command = [sys.executable, "-c", FIRST, what]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=compiled)
        return [float(number) for number in done.stdout.split()]

    # As an installed package: its modules are compiled once, by the first process.
    compiled = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    once("tapped")
    found = [(once("tapped"), once("untapped")) for _ in range(max(rounds, 5))]
    imports = figure([tapped[0] for tapped, _ in found])
    adds = figure([tapped[1] - untapped[1] for tapped, untapped in found])
    return [
        imports.within(100.0, "importing hostcallback and its first names, beyond JAX", "ms"),
        adds.within(
            50.0, "the first tap in a process, delivered: what it adds to a program's first call", "ms"
        ),
    ]


def compile_vmap_ms(tap: Callable[[Any], Any]) -> float:
    """Milliseconds of tracing, lowering and compiling a function of 4 x 4 matrices and a tap under a vmap of 1,024."""
    x = jnp.ones((1024, 4, 4))

    def element(x: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ x) + jnp.sin(x)
        tap(x)
        return x

    program = jax.jit(jax.vmap(element))
    start = perf_counter()
    program.lower(x).compile()
    return (perf_counter() - start) * 1e3


def vmapped_print(rounds: int) -> list[Row]:
    """Tracing, lowering and compiling a program with a print under vmap, and without; it is not run.

    `jax.debug.print`, which unrolls, is compiled once only.
    """
    ours, peer = measure(
        [lambda: compile_vmap_ms(lambda x: hcb.print("x {}", x)), lambda: compile_vmap_ms(lambda x: None)],
        rounds,
    )
    unrolled = Figure(compile_vmap_ms(lambda x: jax.debug.print("x {}", x)), 0.0)
    name = "`vmap` of `hcb.print` over 1,024: trace, lower, compile"
    return [
        ours.versus(peer, name, "ms", "the untapped function", 1.2),
        ours.versus(unrolled, "the same", "ms", "jax.debug.print (once)", None),
    ]
