"""The benchmarks of loops with progress bars: ours, jax-tqdm's and none, in the same scan of steps of a microsecond.

The clock stops when the results are there and the bar is at its end. The bars' text goes to a pipe. jax-tqdm's rows are
left out where it is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb
from tools.bench.handlers import empty_call, pace
from tools.bench.row import Row, measure
from tools.bench.separate_process import rows_of_process

STEPS = 600_000
FEWER_STEPS = 2_000
"""Steps of the side that prints each."""

WIDTH = 512
"""Elements of the carry: a step takes about a microsecond."""

WIDE = 30_000
"""Elements of one that takes about 50 microseconds."""

PACE_SEC = 1e-3

UNIT, LOOP_IN_LOOP = "us/step", "a loop in a loop, with an empty FFI call"


def progress_bar(rounds: int) -> list[Row]:
    """`hcb.scan` against `lax.scan`, and against `jax_tqdm.scan_tqdm` by default and at `print_rate=1`.

    The floor is two nested loops without our code. The inner loop runs to a number that it is given, about as many
    steps as ours takes between two readings of the clock; an empty FFI call follows it.
    """
    return rows_of_process(__name__, "progress_bar_here", rounds, devices=1)


def progress_bar_here(rounds: int) -> list[Row]:
    """`progress_bar`, in this process."""
    sides = [
        _timed(lambda step, xs: lambda x: hcb.scan(step, x, xs)[0], STEPS),
        _timed(lambda step, xs: lambda x: lax.scan(step, x, xs)[0], STEPS),
        _timed(_in_blocks(1_200), STEPS),
    ]
    if importlib.util.find_spec("jax_tqdm") is None:
        print("jax-tqdm: no row: it is missing (pip install -e '.[libraries]')", file=sys.stderr)
    else:
        sides += [_jax_tqdm(STEPS), _jax_tqdm(FEWER_STEPS, print_rate=1)]
    ours, bare, least, *peers = measure(sides, rounds)
    rows = [ours.versus(bare, "a scan with `hcb.scan`'s bar", UNIT, "`lax.scan`, without a bar", 1.02)]
    rows.append(ours.versus(least, "the same", UNIT, LOOP_IN_LOOP, None))
    names = ["jax-tqdm's bar, by default", "jax-tqdm's bar, `print_rate=1`"]
    rows += [
        ours.versus(peer, "the same", UNIT, name, None) for name, peer in zip(names, peers, strict=False)
    ]
    return rows


def stopping(rounds: int) -> list[Row]:
    """`hcb.scan` with `stop=True` against `lax.scan`, without a request; the floor is as of `progress_bar`.

    Forty times the rounds of other rows, each of some 40 ms: the bounds are 2 and 3 %, less than a round's spread.
    """
    return rows_of_process(__name__, "stopping_here", 40 * rounds, devices=1)


def stopping_here(rounds: int) -> list[Row]:
    """`stopping`, in this process."""
    rows = []
    for width, steps, block, what, bound in (
        (WIDTH, STEPS // 20, 600, "of about a microsecond", 1.03),
        (WIDE, FEWER_STEPS // 4, 10, "of about 50 us", 1.02),
    ):
        ours, bare, least = measure(
            [
                _timed(
                    lambda step, xs: lambda x: hcb.scan(step, x, xs, stop=True, progress=False)[0],
                    steps,
                    width,
                ),
                _timed(lambda step, xs: lambda x: lax.scan(step, x, xs)[0], steps, width),
                _timed(_in_blocks(block), steps, width),
            ],
            rounds,
        )
        row = f"a scan with `stop=True`, steps {what}"
        rows.append(ours.versus(bare, row, UNIT, "`lax.scan`, which cannot be stopped", bound))
        rows.append(ours.versus(least, "the same", UNIT, LOOP_IN_LOOP, None))
    return rows


def stop_latency(rounds: int) -> Row:
    """From a request to stop until the result is there, in iterations of a millisecond, in which no processor works."""
    loop = jax.jit(
        lambda x: hcb.fori_loop(0, 10**6, lambda i, x: pace(x, PACE_SEC), x, stop=True, progress=False)
    )

    def once() -> float:
        asked: list[float] = []

        def ask() -> None:
            asked.append(perf_counter())
            hcb.request_stop("the benchmark")

        timer = threading.Timer(0.05, ask)
        timer.start()
        jax.block_until_ready(loop(jnp.float32(1)))
        taken = perf_counter() - asked[0]
        timer.join()
        hcb.clear_stop()
        return taken / PACE_SEC

    (mine,) = measure([once], rounds)
    return mine.within(2.0, "a request to stop, until the loop has ended: iterations of a millisecond", "")


def _in_blocks(block: int) -> Callable[[Any, Any], Callable[[Any], Any]]:
    def make(step: Any, xs: Any) -> Callable[[Any], Any]:
        def one(state: Any) -> Any:
            number, carry = state
            return number + 1, step(carry, xs[number])[0]

        def several(state: Any) -> Any:
            end, *inner = state
            number, carry = lax.while_loop(lambda state: state[0] < end, one, (*inner,))
            return jnp.minimum(end + block, len(xs)), empty_call(number), carry

        return lambda x: lax.while_loop(lambda state: state[1] < len(xs), several, (block, 0, x))[2]

    return make


def _jax_tqdm(steps: int, **options: Any) -> Callable[[], float]:
    from jax_tqdm import scan_tqdm

    return _timed(lambda step, xs: lambda x: lax.scan(scan_tqdm(steps, **options)(step), x, xs)[0], steps)


def _timed(
    make: Callable[[Any, Any], Callable[[Any], Any]], steps: int, width: int = WIDTH
) -> Callable[[], float]:
    def step(carry: Any, number: Any) -> Any:
        return jnp.sin(carry) * 1.01, None

    x = jnp.full(width, 0.1)
    program = jax.jit(make(step, jnp.arange(steps))).lower(x).compile()

    def once() -> float:
        start = perf_counter()
        jax.block_until_ready(program(x))
        jax.effects_barrier()
        return (perf_counter() - start) / steps * 1e6

    return once
