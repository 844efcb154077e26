"""Measures taps against the alternatives that users have, in one run, and writes docs/benchmarks.md.

Every row times both sides on one machine, in turn, several rounds, and compares medians: absolute times change with the
machine, ratios hardly. Both sides deliver the value to a Python function before the clock stops.

    python tools/bench.py [--rounds N] [--messages N] [--only TEXT] [--no-write] [--compare] [--accept] [--charts]

Each run is compared with the last accepted one, and names every row that became worse by more than its spread; a time
with a limit may be as much longer as those of the peers. Then status 1, and nothing is written without
`--accept`. The documents take their figures from that page: see tools/documents/costs.py.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import perf_counter

import jax

from tools.bench import accepted, charts
from tools.bench.machine import describe_machine
from tools.bench.row import Row, table
from tools.bench.rows import (
    accelerate,
    checks,
    compiling,
    dispatch,
    flight,
    libraries,
    observing,
    outputs,
    page,
    payload,
    places,
    progress,
    receiving,
    recording,
    scan,
    training,
)
from tools.bench.rows.failures import capsules, jobs
from tools.bench.rows.remote import forwarding, many_clients, nats_and_otlp
from tools.documents import costs as document_costs
from tools.gpu.check import REPORT as GPU_REPORT, TABLE_BEGINS

Rows = Row | list[Row]

EXPLANATION = """\
The values are medians of several rounds; hostcallback and the peer run in turn. The ratio is the median of the rounds'
ratios, so that a machine that becomes slower meanwhile changes it little; the spread is half the interquartile range of
these ratios. Both sides deliver every value to a Python function before the clock stops, except in rows that say
otherwise. Ratios carry over to other machines, times do not. The docstring of each row's function, in
`tools/bench/rows/`, describes the work of both sides.

`python tools/bench.py --only TEXT` runs the rows of `tools/bench/run.py` whose name contains the text, and writes
nothing; `python tools/bench.py --only memory --messages 100000000` is the memory row over 100 million (2 to 5
minutes). `make bench BENCH=--compare` writes nothing, and names the rows that became worse than the accepted figures by
more than their spread (docs/benchmarks/accepted.json); on a slower machine, times with a limit by as much more."""

REPORT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

ROWS: dict[str, Callable[[int], Rows]] = {
    "device_side": scan.device_side,
    "scalar_in_scan": scan.scalar,
    "batched": scan.batched,
    "pytree_in_scan": scan.pytree,
    "kept_arrays": payload.kept,
    "array_in_scan": payload.beside_callback,
    "one_call": dispatch.one_call,
    "accelerated_scan": accelerate.accelerated_scan,
    "accelerated_ordered_scan": accelerate.accelerated_ordered_scan,
    "accelerated_io_scan": accelerate.accelerated_io_scan,
    "accelerated_call": accelerate.accelerated_call,
    "accelerated_call_with_result": accelerate.accelerated_call_with_result,
    "accelerated_vmap": accelerate.accelerated_vmap,
    "progress_bar": progress.progress_bar,
    "stopping": progress.stopping,
    "stop_latency": progress.stop_latency,
    "library_jax_tqdm": libraries.jax_tqdm,
    "library_diffrax": libraries.diffrax,
    "library_numpyro": libraries.numpyro,
    "library_blackjax": libraries.blackjax,
    "four_devices": dispatch.four_devices,
    "calls_back_to_back": dispatch.back_to_back,
    "first_call": compiling.first_call,
    "starting": compiling.starting,
    "vmapped_print": compiling.vmapped_print,
    "switched_off": scan.switched_off,
    "knob": scan.knob,
    "recording": recording.recording,
    "latency": receiving.latency,
    "training_loop": training.training_loop,
    "metrics_in_a_loop": outputs.metrics_in_a_loop,
    "million_scalars": outputs.million_scalars,
    "page_of_a_large_log": page.page_of_a_large_log,
    "watched_page": page.watched_page,
    "page_of_a_training_loop": page.page_of_a_training_loop,
    "slow_consumer": receiving.slow_consumer,
    "call_in_scan": scan.call,
    "one_call_of_the_host": dispatch.one_call_of_the_host,
    "tap_sites": scan.tap_sites,
    "eight_devices": dispatch.eight_devices,
    "idle_receivers": receiving.idle,
    "busy_receiver": receiving.busy,
    "ring_in_file": flight.ring_in_file,
    "forwarding": forwarding.forwarding,
    "forwarded_training_loop": forwarding.forwarded_training_loop,
    "many_clients": many_clients.many_clients,
    "forwarding_nats": nats_and_otlp.forwarding_nats,
    "exporting_otlp": nats_and_otlp.exporting_otlp,
    "holding_check": checks.holding_check,
    "holding_check_against_checkify": checks.holding_check_against_checkify,
    "failing_check": checks.failing_check,
    "checked_call": checks.checked_call,
    "checks_compile": checks.checks_compile,
    "demo_checks": checks.demo_checks,
    "observed_step": observing.observed_step,
    "sharded_observed_step": observing.sharded_step,
    "timed_step": places.transformer_step,
    "timed_places": places.known_work,
    "watched_steps": checks.watched_steps,
    "watched_failure": checks.watched_failure,
    "sized_calls": observing.sized_calls,
    "sized_first_calls": observing.sized_first_calls,
    "sized_diagnosis": observing.sized_diagnosis,
    "capsule_written": capsules.capsule_written,
    "capsule_step": capsules.capsule_step,
    "capsule_of_a_failure": capsules.capsule_of_a_failure,
    "failing_job": jobs.failing_job,
}
"""Benchmark functions by name, given the number of rounds. `memory`, which is given messages instead, comes last."""


def main(argv: list[str] | None = None) -> int:
    """Runs the rows; status 1 if a bound is missed, a row fails or became worse: the latter two write nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row (default 9)")
    parser.add_argument("--messages", type=int, default=20_000_000, help="for the memory row")
    parser.add_argument("--only", default="", help="rows whose function name contains this")
    parser.add_argument("--no-write", "--compare", action="store_true", help="print only")
    parser.add_argument("--accept", action="store_true", help="write, though rows became worse")
    parser.add_argument(
        "--rebase",
        action="store_true",
        help="keep this machine's figures, as after a change of JAX or machine",
    )
    parser.add_argument(
        "--charts", action="store_true", help="measure nothing, draw the charts of the last run"
    )
    args = parser.parse_args(argv)
    if args.charts:
        charts.redraw(REPORT)
        return 0
    benchmarks = {**ROWS, "memory": lambda _: receiving.memory(args.messages)}
    rows: list[Row] = []
    failed: list[str] = []
    for name, benchmark in benchmarks.items():
        if args.only in name:
            # Frees the programs of earlier rows, so that Python's garbage collector does not traverse them during this
            # one.
            jax.clear_caches()
            gc.collect()
            start = perf_counter()
            try:
                found = benchmark(args.rounds)
            except Exception:  # The other rows are measured all the same.
                traceback.print_exc()
                failed.append(name)
                continue
            print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            for row in found if isinstance(found, list) else [found]:
                rows.append(row)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\n{describe_machine()}")
    if failed:
        print(f"\nNot measured, see the errors above: {', '.join(failed)}", file=sys.stderr)
    worse, new = accepted.changes(rows, accepted.load(), whole=not args.only and not failed)
    print("\n".join(["", *new, *worse, f"{len(worse)} row(s) became worse than the last accepted figures"]))
    if not args.no_write and not args.only and not failed and (args.accept or args.rebase or not worse):
        head = f"# Benchmarks\n\nMade by `make bench` on {date.today().isoformat()}: {describe_machine()}."
        gpu = GPU_REPORT.read_text(encoding="utf-8").partition(TABLE_BEGINS)[2].strip()
        text = f"{head}\n\n{EXPLANATION}\n\n{table(rows)}\n\n## On a GPU\n\n{gpu}\n\nSee [gpu.md](gpu.md).\n"
        REPORT.write_text(text, encoding="utf-8")
        charts.redraw(REPORT)
        document_costs.main()
        accepted.save(rows, rebase=args.rebase)
    return 0 if not failed and not worse and all(row.reached for row in rows) else 1
