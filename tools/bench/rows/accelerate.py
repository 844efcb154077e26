"""The benchmarks of `hcb.accelerate()`: JAX's own callbacks with it and without it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import hostcallback as hcb
from tools.bench.row import Row, measure, measure_together
from tools.bench.rows.compiling import compile_vmap_ms
from tools.bench.rows.dispatch import CALLS, medians_of_calls, untapped
from tools.bench.timing import Counter, delivered_us, scan

STEPS, JAXS_STEPS = 100_000, 2_000


def accelerated(program: Callable[[Any], Any], x: Any) -> Callable[[Any], Any]:
    """The program, traced and compiled under `hcb.accelerate()`, which it keeps."""
    with hcb.accelerate() as acceleration:
        jax.block_until_ready(program(x))
    assert [c.reason for c in acceleration.callbacks] == [None]
    hcb.barrier_wait()
    return program


def accelerated_scan(rounds: int) -> list[Row]:
    """`jax.debug.callback` of a scalar in each step of a scan, unordered as by default, until the last one was called.

    Accelerated, as it is, and `hcb.callback` in the same scan.
    """
    return _in_scan(
        rounds,
        "`jax.debug.callback` in a scan, accelerated, delivered",
        lambda count, c: jax.debug.callback(count, c),
        lambda count, c: hcb.callback(count, c, ordered=False),
        1.2,
    )


def accelerated_ordered_scan(rounds: int) -> list[Row]:
    """The same with `ordered=True`."""
    return _in_scan(
        rounds,
        "the same with `ordered=True`",
        lambda count, c: jax.debug.callback(count, c, ordered=True),
        lambda count, c: hcb.callback(count, c),
        1.2,
    )


def accelerated_io_scan(rounds: int) -> list[Row]:
    """An ordered `io_callback` without results in each step of a scan, as `accelerated_scan`."""
    return _in_scan(
        rounds,
        "`io_callback(..., None, ordered=True)` in a scan, accelerated, delivered",
        lambda count, c: io_callback(count, None, c, ordered=True),
        lambda count, c: hcb.callback(count, c),
        None,
    )


def _in_scan(
    rounds: int,
    name: str,
    jaxs: Callable[[Counter, Any], Any],
    ours: Callable[[Counter, Any], Any],
    bound: float | None,
) -> list[Row]:
    x = jnp.float32(1)
    fast, slow, own = Counter(), Counter(), Counter()
    accelerated_program = accelerated(scan(jax.jit, lambda c: jaxs(fast, c), STEPS), x)
    jaxs_program = scan(jax.jit, lambda c: jaxs(slow, c), JAXS_STEPS)
    own_program = scan(jax.jit, lambda c: ours(own, c), STEPS)
    figures = measure(
        [
            lambda: delivered_us(lambda: accelerated_program(x), hcb.barrier_wait, STEPS),
            lambda: delivered_us(lambda: jaxs_program(x), jax.effects_barrier, JAXS_STEPS),
            lambda: delivered_us(lambda: own_program(x), hcb.barrier_wait, STEPS),
        ],
        rounds,
    )
    assert fast.count == STEPS * (rounds + 2)
    assert slow.count == JAXS_STEPS * (rounds + 1)
    itself = "itself, not accelerated"
    return [
        figures[0].versus(figures[1], name, "us/message", itself, None if bound is None else 1 / 20),
        figures[0].versus(figures[2], "the same", "us/message", "`hcb.callback`", bound),
    ]


def accelerated_call_with_result(rounds: int) -> Row:
    """A call of an ordered `io_callback`, accelerated, whose result the next step of a scan needs."""
    x, steps = jnp.float32(1), 1_000

    def half(value: Any) -> Any:
        return np.float32(value * np.float32(0.5))

    def program() -> Callable[[Any], Any]:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.jit(
            lambda x: jax.lax.fori_loop(0, steps, lambda i, c: io_callback(half, result, c, ordered=True), x)
        )

    ours, peer = accelerated(program(), x), program()
    mine, theirs = measure(
        [
            lambda: delivered_us(lambda: ours(x), hcb.barrier_wait, steps),
            lambda: delivered_us(lambda: peer(x), jax.effects_barrier, steps),
        ],
        rounds,
    )
    name = "ordered `io_callback` with a result in a loop, accelerated"
    return mine.versus(theirs, name, "us/call", "itself, not accelerated", None)


def accelerated_call(rounds: int) -> list[Row]:
    """One jit call with a `jax.debug.print` of an element of an array, accelerated, and without the print.

    The clock stops when the result is ready. The text is printed, into memory, between the timed calls; within the
    `with` block before the clock stops, as JAX does, which is timed against JAX's own print.
    """
    printed, stdout = io.StringIO(), sys.stdout
    x = jnp.ones(16)

    def printing() -> Callable[[Any], Any]:
        return jax.jit(lambda x: (jax.debug.print("x {}", x[0]), untapped(x))[1])

    sys.stdout = printed
    try:
        peer = printing()
        jax.block_until_ready(peer(x))
        tapped = accelerated(printing(), x)
        after = measure_together(lambda: medians_of_calls([tapped, jax.jit(untapped)], x), rounds)
        with hcb.accelerate():
            within = measure_together(lambda: medians_of_calls([tapped, peer], x), rounds)
    finally:
        sys.stdout = stdout
    assert printed.getvalue().count("x 1.0\n") == 3 * CALLS * (rounds + 1) + 2
    name = "one jax.jit call with a `jax.debug.print`, accelerated"
    return [
        after[0].versus(after[1], name, "us/call", "the same without it", 1.3),
        within[0].versus(
            within[1], f"{name}, until it is printed", "us/call", "itself, not accelerated", None
        ),
    ]


def accelerated_vmap(rounds: int) -> Row:
    """Tracing, lowering and compiling `vmap` over 1,024 of a function with a `jax.debug.print`, and without."""

    def compile_ms(tap: Callable[[Any], Any]) -> float:
        with hcb.accelerate():
            return compile_vmap_ms(tap)

    ours, peer = measure(
        [lambda: compile_ms(lambda x: jax.debug.print("x {}", x)), lambda: compile_ms(lambda x: None)], rounds
    )
    name = "`vmap` of `jax.debug.print` over 1,024, accelerated: trace, lower, compile"
    return ours.versus(peer, name, "ms", "the function without it", 1.5)
