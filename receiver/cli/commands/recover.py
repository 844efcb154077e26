"""`hcb recover`: shows the last messages of killed processes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from pathlib import Path

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.arguments.numbers import count
from hostcallback.receiver.cli.arguments.selection import add_selection, selection
from hostcallback.receiver.cli.output.messages import Show, report_damage
from hostcallback.receiver.taplog.flight.recovery import Flight, find_flights, write_log
from hostcallback.receiver.taplog.flight.ring_file import RingContents
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.run_choice import matches
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.terminal import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="the folder of HOSTCALLBACK_FLIGHT_RECORDER, or the folder of one process in it",
    )
    parser.add_argument(
        "--undelivered", action="store_true", help="only messages that no tap function received"
    )
    parser.add_argument("--last", type=count, metavar="N", help="only the last N messages of each process")
    parser.add_argument(
        "--to", type=Path, metavar="LOG", help="write a tap log there instead of showing messages"
    )
    parser.add_argument(
        "--run",
        dest="of_run",
        metavar="RUN",
        help="only processes of this run, or of a pattern (default all)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as `hcb cat --json`")
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    flights = find_flights(arguments.directory)
    if arguments.of_run is not None:
        there = sorted({flight.run for flight in flights if flight.run})
        flights = [flight for flight in flights if matches(flight.run, arguments.of_run)]
        if not flights:
            raise CommandError(
                f"--run {arguments.of_run}: no process of that run left files; there are {', '.join(there) or 'none'}"
            )
    damaged: list[Damage] = []
    for flight in flights:
        if not arguments.json:
            _introduce(flight)
        if arguments.to is not None:
            path = write_log(flight, arguments.to, delivered=not arguments.undelivered)
            print(f"  written to {path}")
            continue
        with tempfile.TemporaryDirectory(prefix="hcb-recover-") as folder:
            write_log(flight, Path(folder), delivered=not arguments.undelivered)
            damaged += _show(flight, Path(folder), arguments, selection(arguments))
    sys.stdout.flush()
    problems = [problem for flight in flights for problem in flight.problems]
    for problem in problems:
        print(f"hcb: {printable(problem)}", file=sys.stderr)
    return report_damage(damaged) or bool(problems)


def _introduce(flight: Flight) -> None:
    print(printable(flight.title))
    for ring in flight.rings:
        print(f"  {printable(ring.name)}: {_describe(ring)}")


def _describe(ring: RingContents) -> str:
    waiting = sum(not message.delivered for message in ring.frames)
    parts = [f"{len(ring.frames) - waiting:,} delivered message(s), {waiting:,} undelivered"]
    if ring.unfinished:
        parts.append(f"{ring.unfinished} unfinished")
    if ring.without_payload:
        parts.append(f"{ring.without_payload} without arrays, which were too large for the file")
    if ring.damaged:
        parts.append(
            f"{len(ring.damaged)} damaged stretch(es): the process wrote into memory that it did not own"
        )
    return "; ".join(parts)


def _show(flight: Flight, log: Path, arguments: argparse.Namespace, wanted: Selection) -> list[Damage]:
    delivered = {
        (ring.name, message.header.seq)
        for ring in flight.rings
        for message in ring.frames
        if message.delivered
    }
    damaged: list[Damage] = []
    last: deque[LoggedMessage] = deque(maxlen=arguments.last)
    show = Show(as_json=arguments.json, full=arguments.full)
    for record in LogReader([log]).records(wanted):
        if isinstance(record, Damage):
            damaged.append(record)
        elif isinstance(record, LoggedMessage):
            last.append(record)
        else:
            show.lost(record, several=False)
    for logged in last:
        had = (logged.message.device, logged.message.seq) in delivered
        show.message(logged, several=False, delivered=had)
    return damaged
