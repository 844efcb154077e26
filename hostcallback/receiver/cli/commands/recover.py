"""`hcb recover`: shows the last messages of killed processes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostcallback.receiver.cli.arguments import (
    add_run,
    add_selection,
    count,
    name_other_runs,
    report_extent,
    selection,
)
from hostcallback.receiver.cli.output.messages import Show, report_damage
from hostcallback.receiver.cli.output.tables import has_launch, report_unmatched_names
from hostcallback.receiver.taplog.flight.recorder import RingContents
from hostcallback.receiver.taplog.flight.recovery import Flight, find_flights, write_log
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import RunCatalog, Selection
from hostcallback.receiver.text import printable


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
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as `hcb cat --json`")
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    flights = _chosen(find_flights(arguments.directory), arguments.of_run)
    wanted, found = selection(arguments), _Found()
    for flight in flights:
        if not arguments.json:
            _introduce(flight)
        if arguments.to is not None:
            path = write_log(flight, arguments.to, delivered=not arguments.undelivered)
            print(json.dumps(_as_dict(flight, path)) if arguments.json else f"  written to {path}")
            continue
        with tempfile.TemporaryDirectory(prefix="hcb-recover-") as folder:
            # All messages: those that are not shown may have the steps of others.
            write_log(flight, Path(folder))
            _show(flight, Path(folder), arguments, wanted, found)
    sys.stdout.flush()
    problems = [problem for flight in flights for problem in flight.problems]
    for problem in problems:
        print(f"hcb: {printable(problem)}", file=sys.stderr)
    status = report_damage(found.damaged) or bool(problems)
    if arguments.to is not None or found.messages:
        return status
    return status or report_unmatched_names(wanted, found.taps, found.devices, has_launch=found.has_launch)


@dataclass
class _Found:
    # What was in the files of all processes.
    messages: int = 0
    damaged: list[Damage] = field(default_factory=list)
    taps: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    has_launch: bool = False


def _chosen(flights: list[Flight], wanted: str | None) -> list[Flight]:
    # Without a wish the last run of which a process has ended: a job that restarts runs again already.
    catalog = RunCatalog()
    for flight in flights:
        catalog.add(flight.run, str(flight.folder), flight.process.get("started_ns"))
    if wanted is not None:
        names = catalog.chosen(wanted)
    else:
        ended = {flight.run for flight in flights if not flight.is_running}
        names = {catalog.newest(ended or {flight.run for flight in flights})}
        name_other_runs(catalog.runs, names)
    return [flight for flight in flights if flight.run in names]


def _as_dict(flight: Flight, path: Path) -> dict[str, Any]:
    process = {key: flight.process.get(key) for key in ("host", "pid", "started_ns")}
    return {"written": str(path), "run": flight.run, **process, "rings": [ring.name for ring in flight.rings]}


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


def _show(flight: Flight, log: Path, arguments: argparse.Namespace, wanted: Selection, found: _Found) -> None:
    delivered = {
        (ring.name, message.header.seq)
        for ring in flight.rings
        for message in ring.frames
        if message.delivered
    }
    last: deque[LoggedMessage] = deque(maxlen=arguments.last)
    show = Show(as_json=arguments.json, full=arguments.full)
    reader = LogReader([log])
    found.taps |= reader.tap_names()
    found.devices |= {ring.name for ring in flight.rings}
    found.has_launch = found.has_launch or has_launch(reader, wanted)
    for record in reader.records(wanted):
        if isinstance(record, Damage):
            found.damaged.append(record)
        elif arguments.undelivered and _key(record) in delivered:
            continue
        elif isinstance(record, LoggedMessage):
            last.append(record)
            found.messages += 1
        else:
            show.lost(record, among=())
    if not last and arguments.last != 0:
        report_extent(reader, wanted, "the flight recorder")
    for logged in last:
        show.message(logged, among=(), delivered=_key(logged) in delivered)


def _key(record: LoggedMessage | LostNote) -> tuple[str, int]:
    if isinstance(record, LoggedMessage):
        return str(record.message.device), record.message.seq
    return record.lost.device, record.lost.first_seq  # of one message, see `write_log`
