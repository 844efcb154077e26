"""Measures taps against what users would pick instead, in one run, and writes docs/benchmarks.md.

Every row times both sides in the same process, in turn, several rounds, and compares medians: absolute times change
with the machine, ratios hardly. Both sides deliver the value to a Python function before the clock stops.

    python tools/bench.py [--rounds N] [--only TEXT] [--no-write]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
from bench_checks import (
    checked_call,
    checks_compile,
    demo_checks,
    failing_check,
    holding_check,
    holding_check_beside_checkify,
)
from bench_row import Row, compare
from jax import lax

import hostcallback as hcb

EXPLANATION = """\
Medians of several rounds, ours and the peer in turn in one process; the spread is half the interquartile range of ours.
Both sides deliver every value to a Python function before the clock stops, but for the rows that say otherwise.
Ratios carry over to other machines, times do not."""

REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def _delivered(program: Callable[[], Any], barrier: Callable[[], None], count: int) -> float:
    """Microseconds a message from the call until the last one was delivered."""
    start = perf_counter()
    jax.block_until_ready(program())
    barrier()
    return (perf_counter() - start) / count * 1e6


class Counter:
    """The Python function that both sides deliver to."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: Any) -> None:
        self.count += 1


def _scan(jit: Any, tap: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
    """A jitted scan that taps its carry in every step."""

    def step(carry: Any, _: Any) -> Any:
        carry = carry * 1.0001
        tap(carry)
        return carry, None

    compiled: Callable[[Any], Any] = jit(lambda x: lax.scan(step, x, None, length=steps)[0])
    return compiled


def _tapped_scans(name: str, x: Any, steps: int, peer_steps: int, bound: float, rounds: int) -> Row:
    ours_count, peer_count = Counter(), Counter()
    ours = _scan(hcb.jit, lambda c: hcb.id_tap(ours_count, c), steps)
    peer = _scan(jax.jit, lambda c: jax.debug.callback(peer_count, c, ordered=True), peer_steps)
    row = compare(
        name,
        "us/message",
        lambda: _delivered(lambda: ours(x), hcb.barrier_wait, steps),
        lambda: _delivered(lambda: peer(x), jax.effects_barrier, peer_steps),
        "jax.debug.callback(ordered=True)",
        bound,
        rounds,
    )
    assert ours_count.count == steps * (rounds + 1)
    assert peer_count.count == peer_steps * (rounds + 1)
    return row


def scalar_in_scan(rounds: int) -> Row:
    """A float32 scalar tapped in every iteration of a scan."""
    name = "scalar tap in a scan, delivered in order"
    return _tapped_scans(name, jnp.float32(1), 20_000, 2_000, 1 / 15, rounds)


def array_in_scan(rounds: int) -> Row:
    """An array of 256 KiB tapped in every iteration of a scan."""
    name = "256 KiB array in a scan, delivered in order"
    return _tapped_scans(name, jnp.ones(64 * 1024, jnp.float32), 400, 400, 1 / 3, rounds)


def _one_tap() -> tuple[Counter, Callable[[Any], Any], Callable[[Any], Any]]:
    count = Counter()

    def untapped(x: Any) -> Any:
        return x * 0.5 + 1

    return count, hcb.jit(lambda x: untapped(hcb.id_tap(count, x))), jax.jit(untapped)


def one_call(rounds: int) -> Row:
    """What one call costs its caller, until its result is ready, with one tap and without."""
    count, tapped, plain = _one_tap()
    y = jnp.ones(16)

    def median_call(f: Callable[[Any], Any]) -> float:
        times = []
        for _ in range(400):
            start = perf_counter()
            f(y).block_until_ready()
            times.append(perf_counter() - start)
            # The message is delivered between two timed calls; the untapped side rests as long.
            hcb.barrier_wait()
            sleep(50e-6)
        return statistics.median(times) * 1e6

    row = compare(
        "one hcb.jit call with one tap (delivered between the timed calls)", "us/call",
        lambda: median_call(tapped), lambda: median_call(plain), "the untapped jax.jit call", 1.5, rounds,
    )  # fmt: skip
    assert count.count == 400 * (rounds + 1)
    return row


def calls_back_to_back(rounds: int) -> Row:
    """Calls as fast as they can be dispatched, while the receiver wants the interpreter lock as well."""
    count, tapped, plain = _one_tap()
    calls = 5_000

    def per_call(f: Callable[[Any], Any]) -> float:
        y = jnp.ones(16)
        start = perf_counter()
        for _ in range(calls):
            y = f(y)
        y.block_until_ready()
        hcb.barrier_wait()
        return (perf_counter() - start) / calls * 1e6

    row = compare(
        "hcb.jit calls back to back, one tap each, all delivered", "us/call", lambda: per_call(tapped),
        lambda: per_call(plain), "the untapped jax.jit calls", None, rounds,
    )  # fmt: skip
    assert count.count == calls * (rounds + 1)
    return row


def vmapped_print_compile(rounds: int) -> Row:
    """Tracing, lowering and compiling a program with a print under vmap, and without."""
    x = jnp.ones((1024, 4, 4))

    def compile_ms(tap: Callable[[Any], Any]) -> float:
        def element(x: Any) -> Any:
            for _ in range(8):
                x = jnp.tanh(x @ x) + jnp.sin(x)
            tap(x)
            return x

        program = jax.jit(jax.vmap(element))
        start = perf_counter()
        program.lower(x).compile()
        return (perf_counter() - start) * 1e3

    return compare(
        "`vmap` of `hcb.print` over 1,024, compiled and not run", "ms",
        lambda: compile_ms(lambda x: hcb.print("x {}", x)), lambda: compile_ms(lambda x: None),
        "compiling the untapped function", 1.2, rounds,
    )  # fmt: skip


def call_in_scan(rounds: int) -> Row:
    """A host function that does nothing, called once a step, each call taking what the last one returned."""
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

    return compare(
        "`hcb.call` of a host function that does nothing, in a scan", "us/call", lambda: per_call(ours),
        lambda: per_call(peer), "jax.pure_callback", None, rounds,
    )  # fmt: skip


MEMORY_PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jax import lax
import hostcallback as hcb

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()

count = 0
def tap(value):
    global count
    count += 1

total = int(sys.argv[1])
steps = 100_000
f = hcb.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(tap, c) + 1, None), x, None, length=steps)[0])
f(jnp.float32(0)); hcb.barrier_wait()
start, high = resident(), 0
for _ in range(total // steps):
    f(jnp.float32(0)).block_until_ready()
    high = max(high, resident())
hcb.barrier_wait()
high = max(high, resident())
assert count == total + steps, count
print((high - start) / 2**20)
"""


def memory(messages: int) -> Row:
    """Growth of resident memory over many messages, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, str(messages)], capture_output=True, text=True, check=True
    )
    from receiver.ring_source import RingConfig

    budget = RingConfig().capacity_bytes / 2**20
    name = f"growth of resident memory over {messages / 1e6:g} million messages"
    return Row(name, "MiB", float(result.stdout), budget + 30, "ring budget + 30 MiB", 1.0, 0.0)


def describe_machine() -> str:
    """Processor, cores, versions."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}, JAX {jax.__version__}, {platform.system()}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| what | ours | spread | peer or limit | its figure | ratio | must be at most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = (
            f"{row.ours:.2f} {row.unit} | ±{row.spread:.0%} | {row.peer_name} | {row.peer:.2f} {row.unit}"
        )
        bound = "-" if row.bound is None else f"1/{1 / row.bound:.0f}" if row.bound < 1 else f"{row.bound:g}"
        ratio = f"1/{1 / row.ratio:.1f}" if row.ratio < 0.7 else f"{row.ratio:.2f}"
        verdict = "" if row.bound is None else "reached" if row.reached else "MISSED"
        lines.append(f"| {row.name} | {figures} | {ratio} | {bound} | {verdict} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the rows; status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row (default 9)")
    parser.add_argument("--messages", type=int, default=10_000_000, help="for the memory row")
    parser.add_argument("--only", default="", help="rows whose function name contains this")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args(argv)
    benchmarks: dict[str, Callable[[], Row | list[Row]]] = {
        "scalar_in_scan": lambda: scalar_in_scan(args.rounds),
        "one_call": lambda: one_call(args.rounds),
        "calls_back_to_back": lambda: calls_back_to_back(args.rounds),
        "array_in_scan": lambda: array_in_scan(args.rounds),
        "vmapped_print_compile": lambda: vmapped_print_compile(args.rounds),
        "call_in_scan": lambda: call_in_scan(args.rounds),
        "holding_check": lambda: holding_check(args.rounds),
        "holding_check_beside_checkify": lambda: holding_check_beside_checkify(args.rounds),
        "failing_check": lambda: failing_check(args.rounds),
        "checked_call": lambda: checked_call(args.rounds),
        "checks_compile": lambda: checks_compile(args.rounds),
        "demo_checks": lambda: demo_checks(args.rounds),
        "memory": lambda: memory(args.messages),
    }
    rows: list[Row] = []
    for name, benchmark in benchmarks.items():
        if args.only in name:
            found = benchmark()
            for row in found if isinstance(found, list) else [found]:
                rows.append(row)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\n{describe_machine()}")
    if not args.no_write and not args.only:
        head = f"# Benchmarks\n\nMade by `make bench` on {date.today().isoformat()}: {describe_machine()}."
        REPORT.write_text(f"{head}\n\n{EXPLANATION}\n\n{table(rows)}\n", encoding="utf-8")
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
