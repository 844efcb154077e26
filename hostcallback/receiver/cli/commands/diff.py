"""`hcb diff`: shows the first message in which two runs differ."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.arguments import number, report_extent, steps
from hostcallback.receiver.cli.output.messages import make_safe, report_damage, show_progress
from hostcallback.receiver.cli.output.tables import BOLD, has_color, painted, report_unmatched_names
from hostcallback.receiver.taplog.configurations import configurations
from hostcallback.receiver.taplog.diff import comparison
from hostcallback.receiver.taplog.diff.pairing import ComparedLog
from hostcallback.receiver.taplog.reading import logged_message, reader, selection
from hostcallback.receiver.taplog.render import plain_value
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array

SAME, DIFFERENT, FAILED = 0, 1, 2
"""Exit statuses, as those of diff; `hostcallback.receiver.cli.main` returns the last one for errors."""


TOLERANCE = number("a number, 0 or more, such as 1e-6", lambda x: x >= 0)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.description = (
        "Shows the first message in which two runs differ. Messages are compared by device and tap (name, source line, "
        "transformations): the n-th with the n-th, at any time. Status: 0 same, 1 different, 2 error."
    )
    add = parser.add_argument
    add("a", metavar="A", help="a folder with a tap log, or a segment of one")
    add("b", metavar="B", help="another one")
    add(
        "--rtol",
        type=TOLERANCE,
        default=0.0,
        metavar="R",
        help="floats are equal if |a - b| <= ATOL + RTOL * |b|",
    )
    add("--atol", type=TOLERANCE, default=0.0, metavar="A", help="see --rtol; both are 0 by default")
    add("--all", action="store_true", help="all differences, device by device, not only the first")
    add("--ignore-lines", action="store_true", help="compare taps by name, even if their source lines differ")
    add(
        "--json",
        action="store_true",
        help="one JSON object per difference, then one with counts; docs/diff.md",
    )
    runs = "the run to compare (default: the last run in each folder); given twice: that of A, and that of B"
    add("--run", dest="of_run", action="append", default=[], metavar="RUN", help=runs)
    group = parser.add_argument_group("which messages to compare")
    name = "of taps of this name; only then those of bars and times, which depend on the clock"
    group.add_argument("--name", action="append", default=[], metavar="GLOB", help=name)
    group.add_argument("--device", action="append", default=[], metavar="D", help="of this device")
    group.add_argument("--step", type=steps, metavar="A:B", help="of the steps from A to B, both included")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    make_safe()
    if len(arguments.of_run) > 2:
        raise CommandError(
            f"--run is given {len(arguments.of_run)} times: once for both logs, or once for each"
        )
    run_a, run_b = [*arguments.of_run, *arguments.of_run][:2] if arguments.of_run else (None, None)
    a = ComparedLog(arguments.a, ignore_lines=arguments.ignore_lines, run=run_a)
    b = ComparedLog(arguments.b, ignore_lines=arguments.ignore_lines, run=run_b)
    _refuse_one_run(a.reader, b.reader)
    first, last = arguments.step or (None, None)
    wanted = selection.Selection(tuple(arguments.name), first, last, tuple(arguments.device))
    show_progress(a.reader, b.reader, by_device=True)
    compared = comparison.Comparison(a, b, comparison.Tolerance(arguments.rtol, arguments.atol), wanted)
    found = 0
    if arguments.all:
        for difference in compared.all():
            _show(difference, arguments.json)
            found += 1
    elif (difference_ := compared.first()) is not None:
        _show(difference_, arguments.json)
        _hint_at_moved_lines(difference_, a, b)
        found = 1
    if not arguments.json:
        _show_configurations(a.reader, b.reader)
    _conclude(compared.outcome, found, arguments)
    sys.stdout.flush()
    trouble = report_damage([*a.damaged, *b.damaged]) or compared.outcome.unaligned
    if not found and not compared.outcome.compared and (a.devices or b.devices):
        devices = {device.device for device in a.devices | b.devices}
        if not report_unmatched_names(wanted, a.tap_names | b.tap_names, devices):
            left_out = ", of the taps that are not left out" if compared.outcome.by_clock else ""
            print(
                "hcb: no messages to compare: no message of these names, devices and steps is in both logs"
                + left_out,
                file=sys.stderr,
            )
            for name, log in (("A", a), ("B", b)):
                report_extent(log.reader, wanted, name)
        trouble = 1
    return DIFFERENT if found else FAILED if trouble else SAME


def _hint_at_moved_lines(difference: comparison.Difference, a: ComparedLog, b: ComparedLog) -> None:
    lacking = a if difference.a is None else b if difference.b is None else None
    name = difference.logged.message.consumer.name
    if lacking and name in lacking.tap_names and lacking.lacks(lacking.key_of(difference.logged)):
        print(
            f"hcb: the other log has a tap {printable(name)} at another line: --ignore-lines compares taps by name",
            file=sys.stderr,
        )


def _show_configurations(a: reader.LogReader, b: reader.LogReader) -> None:
    # What differs in the configurations of two runs that have one.
    configured = [starts[-1] for log in (a, b) for starts in list(configurations(log).values())[:1]]
    if len(configured) == 2:
        for name in dict.fromkeys(name for config in configured for name in config):
            in_a, in_b = (str(config.get(name, "not set")) for config in configured)
            if in_a != in_b:
                print(printable(f"  configuration: {name} is {in_a} in A, {in_b} in B"))


def _refuse_one_run(a: reader.LogReader, b: reader.LogReader) -> None:
    # A folder of several runs that is given twice: its last run was compared with itself.
    writers = [{*log.writers} for log in (a, b)]
    if writers[0] == writers[1] and len(a.runs) > 1:
        names = ", ".join(printable(known.title) for known in a.runs[-5:])
        raise CommandError(
            f"both are one run; its folder has {names}: --run NAME --run NAME compares two of them"
        )


def _show(difference: comparison.Difference, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_dict(difference), allow_nan=False))
        return
    logged, found = difference.logged, difference.found
    consumer = logged.message.consumer
    seqs = [
        f"{item.message.seq} in {log}" for log, item in (("A", difference.a), ("B", difference.b)) if item
    ]
    step = "no step" if logged.step is None else f"step {logged.step}"
    where = f"{difference.device.device}, process {difference.device.process}, message {', '.join(seqs)}"
    title = f"{step}: {printable(consumer.name)} at {printable(consumer.source_line)}, {printable(where)}"
    print(painted(title, BOLD) if has_color() else title)
    print(f"  {printable(found.text)}")
    for leaf in found.leaves[1:]:
        print(f"  {printable(comparison.value_text(leaf))}")


def _as_dict(difference: comparison.Difference) -> dict[str, Any]:
    logged, found = difference.logged, difference.found
    consumer = logged.message.consumer
    return {
        "what": found.what,
        "text": found.text,
        "step": logged.step,
        "name": consumer.name,
        "source_line": consumer.source_line,
        "transforms": [[name, plain_value(params)] for name, params in consumer.transforms],
        "process": difference.device.process,
        "device": difference.device.device,
        "a": _message(difference.a),
        "b": _message(difference.b),
        "leaves": [
            {
                "leaf": leaf.leaf,
                "index": list(leaf.found.index),
                "a": _element(leaf.a, leaf.found.index),
                "b": _element(leaf.b, leaf.found.index),
                "max_absolute": plain_value(leaf.found.max_absolute),
                "max_relative": plain_value(leaf.found.max_relative),
                "differing": leaf.found.count,
                "elements": leaf.a.size,
            }
            for leaf in found.leaves
        ],
    }


def _element(array: Array, index: tuple[int, ...]) -> Any:
    return plain_value(np.asarray(array[index]))


def _message(logged: logged_message.LoggedMessage | None) -> dict[str, int] | None:
    return None if logged is None else {"seq": logged.message.seq, "time_ns": logged.message.time_ns}


def _conclude(outcome: comparison.Outcome, found: int, arguments: argparse.Namespace) -> None:
    for device, unaligned in outcome.unaligned:
        print(
            f"hcb: process {device.process}, {device.device}: not compared from message {unaligned.a.message.seq} in A "
            f"and {unaligned.b.message.seq} in B on: earlier messages were lost, so it is unknown which ones "
            "correspond",
            file=sys.stderr,
        )
    if arguments.json:
        counts = {"compared": outcome.compared, "different": found, "passed_over": outcome.passed_over}
        ends = {"unaligned": len(outcome.unaligned), "left_out": sorted(outcome.by_clock)}
        print(json.dumps({"what": "summary", **counts, **ends}))
        return
    for (in_a, key), count in outcome.more.items():
        print(f"{count:,} more message(s) of {printable(key[0])} only in {'A' if in_a else 'B'}")
    if outcome.passed_over:
        print(
            f"{outcome.passed_over:,} message(s) not compared: their counterparts were dropped, damaged or folded"
        )
    if outcome.by_clock:
        print(f"{outcome.left_out_text}; --name compares them")
    if not found and outcome.compared:
        print(f"{outcome.compared:,} message(s) compared: no difference")
