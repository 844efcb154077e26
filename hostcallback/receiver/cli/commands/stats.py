"""`hcb stats`: counts the messages of a log, by tap, and shows the times of places with the slowest steps."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection, number
from hostcallback.receiver.cli.output.messages import lost_text, make_safe, time_text
from hostcallback.receiver.cli.output.tables import print_table
from hostcallback.receiver.sinks.time_rows import LISTED_FROM, SHOWN_SLOWEST
from hostcallback.receiver.taplog.configurations import configurations
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render import process_text
from hostcallback.receiver.taplog.tap_stats import TapStats, gather
from hostcallback.receiver.text import printable

MAX_SLOWEST = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per configuration of a run, tap, note of lost messages, and tap that rules thinned",
    )
    parser.add_argument(
        "--slowest",
        type=number(f"a whole number up to {MAX_SLOWEST:,}", lambda found: found in range(MAX_SLOWEST + 1)),
        metavar="N",
        help="of times of places, the N slowest steps or iterations and the places that were slow in them "
        f"(default: {SHOWN_SLOWEST}, if there are at least {LISTED_FROM})",
    )
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    log = SelectedLog(arguments)
    has_few = arguments.slowest is not None
    most_slowest = int(arguments.slowest) if has_few else SHOWN_SLOWEST
    found = gather(log.reader.message_runs(log.wanted, by_time=False), log.wanted, most_slowest)
    make_safe()
    thinned = [tap for tap in log.reader.thinned().values() if log.wanted.wants_name(tap.name)]
    taps = sorted(found.taps.values(), key=lambda tap: (-tap.messages, tap.name))
    if arguments.json:
        for run, starts in configurations(log.reader).items():
            for config in starts:
                print(json.dumps({"run": run, "config": config}))
        for tap in taps:
            print(json.dumps(tap.as_dict()))
        for name, times in found.times.items():
            for row in times.rows():
                print(json.dumps({"times": name, **asdict(row)}))
            for step in times.slowest(has_few=has_few):
                places = [place._asdict() for place in step.places]
                print(json.dumps({"slowest": name, **step._asdict(), "places": places}))
        for note in found.lost:
            print(json.dumps({"process": process_text(note.writer), "lost": note.lost._asdict()}))
        for one in thinned:
            print(json.dumps({"thinned": one._asdict()}))
    else:
        for run, starts in configurations(log.reader).items():
            for number, config in enumerate(starts):
                shown = ", ".join(f"{name}={value}" for name, value in config.items())
                print(printable(f"run {run}{', continued' if number else ''}: {shown}"))
        _print(taps)
        for name, times in found.times.items():
            print(f"\n{printable(name)}:\n{times.text(has_few=has_few)}")
        for note in _summed(found.lost):
            print(f"{process_text(note.writer)}, {printable(note.lost.device)}: {lost_text(note.lost)}")
        for one in thinned:
            rules = f", {printable(one.rules)}" if one.rules else ""
            print(f"rules thinned {printable(one.name)}{rules}: {one.suppressed:,} message(s) suppressed")
        for damage in found.damaged:
            if damage.torn:
                print(f"{_torn(damage)}")
    sys.stdout.flush()
    log.damaged += found.damaged
    return log.status(taps)


def _summed(notes: list[LostNote]) -> list[LostNote]:
    # One note of each process, device and reason: a program that drops all the time notes it ten times a second.
    found: dict[tuple[Writer, str, str], LostNote] = {}
    for note in notes:
        key = note.writer, note.lost.device, note.lost.reason
        known = found.get(key)
        count = note.lost.messages + (known.lost.messages if known else 0)
        found[key] = note._replace(lost=note.lost._replace(messages=count))
    return list(found.values())


def _torn(damage: Damage) -> str:
    count = f", {damage.messages} message(s) are incomplete" if damage.messages > 0 else ""
    return f"{printable(damage.path.name)} ends where its process was killed, or is still writing{count}"


def _print(taps: list[TapStats]) -> None:
    if not taps:
        print("no messages")
        return
    head = ("tap", "messages", "bytes", "rate", "steps", "first", "last", "devices", "line")
    rows = [
        (
            printable(tap.name),
            f"{tap.messages:,}",
            f"{tap.nbytes:,}",
            f"{tap.messages_per_sec:,.1f}/s",
            "-" if tap.first_step is None else f"{tap.first_step}:{tap.last_step}",
            time_text(tap.first_time_ns),
            time_text(tap.last_time_ns),
            _devices(tap),
            printable(tap.source_line),
        )
        for tap in taps
    ]
    print_table(head, rows, left=(0, 4, 5, 6, 7, 8))


def _devices(tap: TapStats) -> str:
    names = sorted(tap.devices)
    return ",".join(names) if len(names) <= 3 else f"{len(names)} devices"
