"""The benchmarks of small messages in a scan: on the device, delivered, and in batches."""

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
from tools.bench.handlers import empty_call
from tools.bench.row import Figure, Row, measure, measure_together
from tools.bench.separate_process import rows_of_process
from tools.bench.timing import Counter, Gate, delivered_us, scan, seconds

STEPS = 20_000
"""Scalar messages of one scan; their frames of 192 bytes fit into a device's ring together."""

STREAM = 100_000
"""Scalar messages of one scan that the ring does not hold: the device waits for the receiver, as in any long run."""


def _added_ns(programs: list[Callable[[Any], Any]], bare: Callable[[Any], Any], gate: Gate) -> list[float]:
    """Cost that each program adds to a step of the bare one: of five runs of each, in turn, the fastest."""
    x = jnp.float32(1)
    times: list[list[float]] = []
    for _ in range(5):
        times.append([])
        for program in (bare, *programs):
            with gate.closed():
                times[-1].append(seconds(partial(program, x)))
    fastest, *others = map(min, zip(*times, strict=True))
    return [(other - fastest) / STEPS * 1e9 for other in others]


def device_side(rounds: int) -> Row:
    """The cost of a tap in a step of a scan, against an empty FFI call in the same program with the same operands.

    While a program is timed the receiver is held in its tap function: it would take the interpreter lock, which the
    timing thread needs for reading the clock. The ring holds all messages of a run, so that the device never waits;
    they are delivered before the next one is timed.
    """
    gate = Gate()
    bare, ours = scan(jax.jit, lambda c: c, STEPS), scan(jax.jit, lambda c: hcb.id_tap(gate, c), STEPS)
    empty = scan(jax.jit, empty_call, STEPS)
    mine, peer = measure_together(lambda: _added_ns([ours, empty], bare, gate), rounds)
    assert gate.count == (STEPS + 3) * 5 * (rounds + 1)
    name = "scalar tap in a scan, device side: what it adds to a step"
    return mine.versus(peer, name, "ns", "an empty FFI call, same operands", 2.0)


def knob(rounds: int) -> Row:
    """The cost of reading a knob in a step of a scan, against an empty FFI call in the same program."""
    bare, empty = scan(jax.jit, lambda c: c, STEPS), scan(jax.jit, empty_call, STEPS)
    ours = scan(jax.jit, lambda c: c * hcb.knob("bench", 1.0), STEPS)
    mine, peer = measure_together(lambda: _added_ns([ours, empty], bare, Gate()), rounds)
    name = "a knob that a step of a scan reads: what it adds to the step"
    return mine.versus(peer, name, "ns", "an empty FFI call", 1.5)


def switched_off(rounds: int) -> list[Row]:
    """The same for a tap that is switched off, or ruled, while its program exists: nothing is emitted.

    In a separate process: once a process has switched a tap, its handler always looks for switches.
    """
    return rows_of_process(__name__, "switched_off_here", rounds)


def switched_off_here(rounds: int) -> list[Row]:
    """In this process; see `switched_off`."""
    count = Counter()
    bare, empty = scan(jax.jit, lambda c: c, STEPS), scan(jax.jit, empty_call, STEPS)
    ours = scan(jax.jit, lambda c: hcb.id_tap(count, c, name="bench switched off"), STEPS)
    jax.block_until_ready(ours(jnp.float32(1)))
    hcb.barrier_wait()
    tap = hcb.taps["bench switched off"]
    tap.disable()
    mine, peer = measure_together(lambda: _added_ns([ours, empty], bare, Gate()), rounds)
    tap.enable()
    assert count.count == STEPS
    tap.every(1 << 40)
    ruled, ruled_peer = measure_together(lambda: _added_ns([ours, empty], bare, Gate()), rounds)
    tap.every(1)
    tap.rate(1e-6)
    rated, rated_peer = measure_together(lambda: _added_ns([ours, empty], bare, Gate()), rounds)
    tap.reset()
    hcb.barrier_wait()
    assert STEPS + 3 <= count.count < 2 * STEPS  # of the rate: the first, and the last before each barrier
    name = "a tap switched off at run time: what it adds to a step of a scan"
    ruled_name = "a tap that sends each n-th message only, for those that it does not send: the same"
    rated_name = "a tap with a rate, for the messages that it leaves out: the same"
    empty_name = "an empty FFI call, same operands"
    return [
        mine.versus(peer, name, "ns", empty_name, 1.2),
        ruled.versus(ruled_peer, ruled_name, "ns", empty_name, None),
        rated.versus(rated_peer, rated_name, "ns", empty_name, None),
    ]


def beside_debug_callback(
    x: Any, steps: int, peer_steps: int, rounds: int, *more: Callable[[], float]
) -> list[Figure]:
    """Microseconds a message of `x` in a scan, delivered: ours, `jax.debug.callback(ordered=True)`, and others."""
    mine, theirs = Counter(), Counter()
    ours = scan(jax.jit, lambda c: hcb.id_tap(mine, c), steps)
    peer = scan(jax.jit, lambda c: jax.debug.callback(theirs, c, ordered=True), peer_steps)
    figures = measure(
        [
            lambda: delivered_us(lambda: ours(x), hcb.barrier_wait, steps),
            lambda: delivered_us(lambda: peer(x), jax.effects_barrier, peer_steps),
            *more,
        ],
        rounds,
    )
    assert mine.count == steps * (rounds + 1)
    assert theirs.count == peer_steps * (rounds + 1)
    return figures


def beside_callback(name: str, x: Any, steps: int, peer_steps: int, bound: float, rounds: int) -> Row:
    mine, peer = beside_debug_callback(x, steps, peer_steps, rounds)
    return mine.versus(peer, name, "us/message", "jax.debug.callback(ordered=True)", bound)


def scalar(rounds: int) -> Row:
    """A float32 scalar tapped in every step of a scan, until the last one was delivered, in order."""
    name = "scalar tap in a scan, delivered to a Python function, in order"
    return beside_callback(name, jnp.float32(1), STREAM, 2_000, 1 / 30, rounds)


def pytree(rounds: int) -> Row:
    """A dict of 8 float32 arrays of 1 to 8 elements, all changed and tapped as one message in every step of a scan."""
    tree = {f"array {n}": jnp.ones(n, jnp.float32) for n in range(1, 9)}
    return beside_callback(
        "pytree of 8 small arrays in a scan, delivered, in order", tree, 5_000, 500, 1 / 25, rounds
    )


def batched(rounds: int) -> list[Row]:
    """The scalars of a scan, to a function that takes them as stacked arrays.

    The limit is 2 million values a second. The structured-array copy takes the values out of an array of as many
    frames, in batches of 1,024, and calls the same function.
    """
    values = 0

    def take(stacked: Any) -> None:
        nonlocal values
        values += len(stacked)

    ours = scan(jax.jit, lambda c: hcb.id_tap(take, c, batched=True), STREAM)
    fields = np.dtype({"names": ["value"], "formats": ["<f4"], "offsets": [128], "itemsize": 192})
    frames = np.zeros(STREAM, fields)

    def copies() -> float:
        start = perf_counter()
        for first in range(0, STREAM, 1024):
            take(frames["value"][first : first + 1024].copy())
        return (perf_counter() - start) / STREAM * 1e6

    mine, peer = measure(
        [lambda: delivered_us(lambda: ours(jnp.float32(1)), hcb.barrier_wait, STREAM), copies], rounds
    )
    assert values == 2 * STREAM * (rounds + 1)
    name = "scalar tap in a scan, delivered in batches (`batched=True`)"
    return [
        mine.within(0.5, name, "us/value"),
        mine.versus(peer, "the same", "us/value", "one structured-array copy", None),
    ]


def tap_sites(rounds: int) -> Row:
    """Messages from a scan with 1,000 taps a step, each a separate consumer, against the same number from one tap."""
    seen = 0

    def take(value: Any, site: int) -> None:
        nonlocal seen
        seen += 1

    def program(sites: int) -> Callable[[Any], Any]:
        def tap_all(carry: Any) -> None:
            for site in range(sites):
                hcb.id_tap(take, carry, site=site)

        return scan(jax.jit, tap_all, STREAM // sites)

    many, one = program(1_000), program(1)

    def run(program: Callable[[Any], Any]) -> float:
        return delivered_us(lambda: program(jnp.float32(1)), hcb.barrier_wait, STREAM)

    mine, peer = measure([lambda: run(many), lambda: run(one)], rounds)
    assert seen == 2 * STREAM * (rounds + 1)
    return mine.versus(peer, "cost per message with 1,000 tap sites", "us/message", "one tap site", 1.25)


def call(rounds: int) -> Row:
    """A host function that does nothing, called once a step, each call taking the previous call's result."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    steps = 1_000

    def nothing(x: Any) -> Any:
        return x

    def program(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(lambda x: lax.scan(lambda c, _: (call(c) + 1, None), x, None, length=steps)[0])

    ours = program(lambda c: hcb.call(nothing, c, result_shape=shape))
    peer = program(lambda c: jax.pure_callback(nothing, shape, c))

    def per_call(f: Callable[[Any], Any]) -> float:
        start = perf_counter()
        result = f(jnp.float32(0))
        assert float(result) == steps
        return (perf_counter() - start) / steps * 1e6

    mine, theirs = measure([lambda: per_call(ours), lambda: per_call(peer)], rounds)
    name = "`hcb.call` of a host function that does nothing, in a scan"
    return mine.versus(theirs, name, "us/call", "jax.pure_callback", 1.0)
