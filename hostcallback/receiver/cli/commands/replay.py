"""`hcb replay`: delivers a log's messages once more, to its printers and to functions of the user."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostcallback.receiver.cli import USAGE, CommandError
from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection, add_shards, number
from hostcallback.receiver.cli.output.messages import make_safe, report_damage
from hostcallback.receiver.cli.output.tables import report_unmatched
from hostcallback.receiver.failures.check_report import CheckError
from hostcallback.receiver.log import INDENT
from hostcallback.receiver.messages import Sink
from hostcallback.receiver.replayer.replay import Replay, Replayed
from hostcallback.receiver.sinks.scalars import ScalarsSink, scalars_into
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.text import printable, printable_lines

SPEED = number("a number above 0, such as 1 or 0.5", lambda x: 0 < x < math.inf)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="NAME=WHERE:FUNCTION",
        help="a function for the messages of taps with this name or pattern; WHERE is a module or a .py file",
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="write the scalars of messages to this file, as CSV if it ends in .csv, else as JSON lines",
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--realtime", action="store_const", const=1.0, dest="speed", help="at the original speed"
    )
    pace.add_argument("--speed", type=SPEED, metavar="X", help="at X times the original speed")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the summary as a JSON object on standard output; what taps print goes to standard error",
    )
    add_shards(parser)
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    bind = dict(_bound(text) for text in arguments.bind)
    log = SelectedLog(arguments, prints=True)
    if bind and report_unmatched(log.reader, Selection(names=tuple(bind))):
        return USAGE
    make_safe()
    with contextlib.ExitStack() as stack:
        if arguments.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        sinks: list[Sink] = []
        scalars: ScalarsSink | None = None
        if arguments.metrics is not None:
            several = len(log.reader.devices(log.wanted)) > 1
            scalars = stack.enter_context(scalars_into(arguments.metrics, devices=several))
            sinks.append(scalars)
        replay = Replay(log.reader, bind=bind, sinks=sinks, shards=arguments.shards)
        replayed = replay.run(log.wanted, arguments.speed)
    sys.stdout.flush()
    damaged = {str(damage) for damage in replayed.damaged}
    report = replay.scope.deferred.take()
    status = report_damage(replayed.damaged)
    for error in () if report is None else report.exceptions:
        if not damaged or not any(text in str(error) for text in damaged):
            print(f"hcb: {printable_lines(_described(error), INDENT)}", file=sys.stderr)
            status = 1
    _sum_up(replayed, scalars, arguments)
    return status or log.status(replayed.messages or replayed.skipped)


def _described(error: BaseException) -> str:
    if isinstance(error, CheckError):
        return f"check failed: {error}"
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def _sum_up(replayed: Replayed, scalars: ScalarsSink | None, arguments: argparse.Namespace) -> None:
    if arguments.json:
        file = None if scalars is None else {"file": arguments.metrics, "scalars": scalars.written.total()}
        counts = {
            "messages": replayed.messages, "skipped": replayed.skipped, "incomplete": replayed.incomplete,
            "failed_checks": len(replayed.failed_checks), "metrics": file,
        }  # fmt: skip
        print(json.dumps(counts), flush=True)
        return
    text = f"replayed {replayed.messages:,} message(s)"
    skipped = replayed.skipped
    if scalars is not None:
        taken = {name: count for name, count in skipped.items() if name in scalars.taps}
        skipped = Counter({name: count for name, count in skipped.items() if name not in taken})
        text = f"replayed {replayed.messages + sum(taken.values()):,} message(s)"
        text += f", {scalars.written.total():,} scalar(s) are in {arguments.metrics}"
    if skipped:
        taps = ", ".join(f"{name} ({count:,})" for name, count in skipped.most_common(8))
        text += f"; no function takes those of {taps}: --bind NAME=WHERE:FUNCTION"
    print(printable(text), file=sys.stderr)
    for reason, count in replayed.incomplete.items():
        print(f"hcb: {count:,} value(s) of {printable(reason)}", file=sys.stderr)


def _bound(text: str) -> tuple[str, Callable[..., Any]]:
    name, equals, rest = text.partition("=")
    where, colon, attribute = rest.rpartition(":")
    if not name or not equals or not colon or not attribute:
        raise CommandError(
            f"--bind {text!r}: expected NAME=MODULE:FUNCTION, such as loss=myproject.plots:draw"
        )
    try:
        if where.endswith(".py"):
            found = runpy.run_path(where)[attribute]
        else:
            sys.path.insert(0, str(Path.cwd()))
            found = getattr(importlib.import_module(where), attribute)
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise CommandError(f"--bind {text!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise CommandError(f"--bind {text!r}: {attribute} is a {type(found).__name__}, expected a function")
    return name, found
