"""`hcb errors`: shows failed checks as the program would have reported them, and exceptions of tap functions."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection
from hostcallback.receiver.cli.output.messages import make_safe, time_text
from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.failures.steps import MAX_STEPS, Range, told_text
from hostcallback.receiver.failures.told_failure import ToldFailure, told_failures
from hostcallback.receiver.replayer.replay import Replay
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render import plain_value, process_text
from hostcallback.receiver.text import printable_report

MAX_LINES = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line with failed checks")
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    log = SelectedLog(arguments)
    replayed = Replay(log.reader, printers=False, checks_only=True, max_errors=MAX_LINES).run(log.wanted)
    make_safe()
    found = [_check(check) for check in replayed.failed_checks]
    found += [_exception(*each, several=len(log.reader.writers) > 1) for each in _exceptions(log)]
    for number, (described, report) in enumerate(found):
        if arguments.json:
            print(json.dumps(plain_value(described), allow_nan=False))
        else:
            print(f"{chr(10) if number else ''}{printable_report(report)}")
    if not found and not arguments.json:
        by_step = log.wanted.by_step
        print(
            f"no check failed{' in these steps; failures of an unknown step are left out' if by_step else ''}"
        )
    sys.stdout.flush()
    log.damaged += replayed.damaged
    return log.status(found)


def _check(check: FailedCheck) -> tuple[dict[str, Any], str]:
    kind = "nonfinite" if check.is_nonfinite else "check"
    return {"kind": kind, **check.as_dict()}, check.report(max_ranges=None)


def _exceptions(log: SelectedLog) -> Iterator[tuple[Writer, ToldFailure]]:
    wanted = log.wanted
    if wanted.launch is not None:
        return  # those of a launch are not known
    for writer, told in log.reader.exceptions().items():
        for raised in sorted(told_failures(told), key=lambda each: each.first):
            is_within = (wanted.until_ns is None or raised.first * 1e9 < wanted.until_ns) and (
                wanted.since_ns is None or raised.last * 1e9 >= wanted.since_ns
            )
            if (
                is_within
                and wanted.wants_name(raised.name)
                and any(map(wanted.wants_device, raised.by_device))
                and _wants_steps(wanted, raised.steps)
            ):
                yield writer, raised


def _wants_steps(wanted: Selection, ranges: list[Range]) -> bool:
    low, high = wanted.first_step, wanted.last_step
    is_any = any((low is None or last >= low) and (high is None or first <= high) for first, last in ranges)
    return is_any or not wanted.by_step


def _exception(writer: Writer, raised: ToldFailure, *, several: bool) -> tuple[dict[str, Any], str]:
    first, last = int(raised.first * 1e9), int(raised.last * 1e9)
    count = sum(raised.by_device.values())
    steps = (step for low, high in raised.steps for step in range(low, high + 1))
    described = {
        "kind": raised.kind, "name": raised.name, "message": raised.title, "source_line": raised.source_line,
        "process": process_text(writer), "values": raised.values, "traceback": raised.traceback, "count": count,
        "by_device": raised.by_device, "first": {"time_ns": first, "step": raised.first_step},
        "last": {"time_ns": last, "step": raised.last_step},
        "steps": [*itertools.islice(steps, MAX_STEPS)], "more_steps": raised.more_steps,
        "without_step": raised.without_step,
    }  # fmt: skip
    devices = ", ".join(f"{number:,} on {device}" for device, number in sorted(raised.by_device.items()))
    at_steps = told_text(raised.steps, raised.more_steps, raised.without_step, "exception")
    where = f"  {process_text(writer)}: " if several else "  "
    lines = [
        f"{raised.title}, raised by the tap {raised.name} at {raised.source_line}",
        *([f"  {raised.values}"] if raised.values else []),
        f"{where}{count:,} exception{'s' * (count > 1)} ({devices}), the first at {time_text(first)}"
        + (f", the last at {time_text(last)}" if count > 1 else ""),
        *([f"  {at_steps}"] if at_steps else []),
        *[f"  {line}" for line in raised.traceback.splitlines()],
    ]
    return described, "\n".join(lines)
