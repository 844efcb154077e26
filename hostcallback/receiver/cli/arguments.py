"""Arguments that several commands take: a collector, numbers, and the selection of messages."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.output.messages import report_damage, show_progress, time_text
from hostcallback.receiver.cli.output.tables import report_unmatched
from hostcallback.receiver.messages import launch_bits
from hostcallback.receiver.remote.brokers import DIRECT
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import LoggedRun, Selection, unread_text
from hostcallback.receiver.taplog.tap_stats import gather

Found = TypeVar("Found")


def add_reaching(
    group: Any, *, runs: str = "of this run, or a pattern", default: str | None = "*", prefix: str = ""
) -> None:
    """Adds the options to a parser or an argument group: the runs, with their help and default, and TLS.

    They are `--tls-ca` and so on; with a prefix, `--PREFIX-ca`.
    """
    group.add_argument("--run", dest="of_run", metavar="RUN", default=default, help=runs)
    of = prefix or "tls"
    group.add_argument(f"--{of}-ca", metavar="FILE", help="certificates that verify the collector's")
    group.add_argument(f"--{of}-cert", metavar="FILE", help="this client's certificate")
    key = "its key (the token is read from HOSTCALLBACK_TOKEN)"
    group.add_argument(f"--{of}-key", metavar="FILE", help=key)
    insecure = f"--{prefix}-insecure" if prefix else "--insecure"
    group.add_argument(
        insecure, action="store_true", help="send the token to another machine also without TLS"
    )


def reaching(address: str, arguments: argparse.Namespace, *, prefix: str = "") -> Forward:
    """Returns the options for the collector at an address; `prefix` as for `add_reaching`.

    Raises:
        CommandError: the address or an option is invalid.
    """
    given, of = vars(arguments), prefix or "tls"
    try:
        found = Forward(
            address, tls_ca=given[f"{of}_ca"], tls_cert=given[f"{of}_cert"], tls_key=given[f"{of}_key"],
            insecure=given[f"{prefix}_insecure" if prefix else "insecure"],
        )  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error)) from error
    if found.broker is not DIRECT:
        raise CommandError(
            f"{found.shown_address} is a {found.broker.title}, and this needs a collector to which processes "
            "forward directly: give the HOST:PORT of hcb collect --listen"
        )
    return found


def count(text: str) -> int:
    """Parses a number of messages."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of messages, 0 or more")
    return int(text)


def port(text: str) -> int:
    """Parses the number of a port; 0 is any free one."""
    if not (text.isascii() and text.isdecimal()) or int(text[:6]) > 65_535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port up to 65535")
    return int(text)


def number(expected: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a parser of numbers that `accepts` is true of, for `type=`; `expected` describes them in errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse


def add_log(parser: argparse.ArgumentParser) -> None:
    """Adds the logs to read."""
    parser.add_argument("log", nargs="+", metavar="LOG", help="a folder with a tap log, or segments of one")
    add_run(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of a run."""
    about = "of this run: a name, a pattern, or all (default: the last run in each folder)"
    parser.add_argument("--run", dest="of_run", metavar="RUN", help=about)


def open_log(paths: Sequence[str], run: str | None) -> LogReader:
    """Opens logs, and names on standard error the runs in the folders that are not read."""
    reader = LogReader(paths, run=run)
    if run is None:
        name_other_runs(reader.runs, {writer.run for writer in reader.writers})
    return reader


class SelectedLog:
    """The log of the arguments, and the damaged parts that are met in it.

    Attributes:
        reader: has the log open.
        wanted: the selection.
        damaged: see `intact`.
    """

    def __init__(self, arguments: argparse.Namespace, *, prints: bool = False) -> None:
        """Opens the log; `prints`: see `show_progress`."""
        self.reader = open_log(arguments.log, arguments.of_run)
        self.wanted = selection(arguments)
        self.damaged: list[Damage] = []
        show_progress(self.reader, prints=prints)

    def intact(self, records: Iterable[Found | Damage]) -> Iterator[Found]:
        """Yields records, and keeps the damage among them."""
        for record in records:
            if isinstance(record, Damage):
                self.damaged.append(record)
            else:
                yield record

    def status(self, found: object) -> int:
        """Reports the damage, and, if nothing is found, what the log has instead; returns the exit status."""
        return report_damage(self.damaged) or (0 if found else report_nothing(self.reader, self.wanted))


def report_nothing(reader: LogReader, wanted: Selection) -> int:
    """Reports on standard error why nothing of a log was selected; returns the exit status: 1 for a mistyped name."""
    status = report_unmatched(reader, wanted)
    if not status:
        report_extent(reader, wanted)
    return status


def report_extent(reader: LogReader, wanted: Selection, what: str = "the log") -> None:
    """Reports on standard error the steps and times that a log has, if no message is of the wanted ones."""
    anytime = dataclasses.replace(wanted, first_step=None, last_step=None, since_ns=None, until_ns=None)
    if wanted == anytime or gather(reader.message_runs(wanted, by_time=False), wanted).taps:
        return
    taps = gather(reader.message_runs(anytime, by_time=False), anytime).taps.values()
    steps = {step for tap in taps for step in (tap.first_step, tap.last_step) if step is not None}
    times = {time for tap in taps for time in (tap.first_time_ns, tap.last_time_ns)}
    kinds, has = [], []
    if wanted.by_step:
        kinds.append("steps")
        span = f"steps {min(steps)} to {max(steps)}" if len(steps) > 1 else f"step {min(steps, default=0)}"
        has.append(span if steps else "no steps")
    if wanted.since_ns is not None or wanted.until_ns is not None:
        kinds.append("times")
        has.append(f"times from {time_text(min(times, default=0))} to {time_text(max(times, default=0))}")
    named = ", of these taps and devices" if wanted.names or wanted.devices else ""
    named += f", of launch {wanted.launch}" if wanted.launch else ""
    shown = " and ".join(has) if taps else "no messages"
    print(f"hcb: no message is of these {' and '.join(kinds)}: {what} has {shown}{named}", file=sys.stderr)


def name_other_runs(runs: Sequence[LoggedRun], read: Collection[str]) -> None:
    """Names on standard error the runs that are not read; `runs` has the last one last."""
    unread = unread_text(runs, read, "--run NAME shows another, --run all all of them")
    if unread:
        print(f"hcb: {unread}", file=sys.stderr)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the conditions on messages."""
    group = parser.add_argument_group("which messages (all conditions must hold)")
    add = group.add_argument
    name = "of taps of this name, such as 'layer*/grad'; repeat it for several"
    add("--name", action="append", default=[], metavar="GLOB", help=name)
    step = "of the steps from A to B, both included; A: and :B are open, A is one step"
    add("--step", type=steps, metavar="A:B", help=step)
    device = "of this device, such as cpu:0 or 'gpu:*'; repeat it for several"
    add("--device", action="append", default=[], metavar="D", help=device)
    since = "emitted at T or later: 2026-11-21T20:15:00 (local time, or with an offset), 20:15 today, or Unix seconds"
    add("--since", type=time_ns, metavar="T", help=since)
    add("--until", type=time_ns, metavar="T", help="emitted before T")
    launched = "of this launch of a program: its name in reports, such as c2db94, or its run_id"
    add("--launch", type=launch, metavar="NAME", help=launched)


def add_shards(parser: argparse.ArgumentParser) -> None:
    """Adds the choice between assembled values and single shards."""
    about = "deliver the shards of programs of several processes one by one; do not assemble them"
    parser.add_argument("--shards", action="store_true", help=about)


def selection(arguments: argparse.Namespace) -> Selection:
    """Returns the selection of the arguments."""
    first, last = arguments.step or (None, None)
    return Selection(
        tuple(arguments.name), first, last, tuple(arguments.device), arguments.since, arguments.until,
        arguments.launch,
    )  # fmt: skip


def launch(text: str) -> str:
    """Checks the name or number of a launch."""
    try:
        launch_bits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def steps(text: str) -> tuple[int | None, int | None]:
    """Parses `A:B`, `A:`, `:B` or `A`; an open end is None."""
    match = re.fullmatch(r"(-?\d+)?(:)?(-?\d+)?", text)
    if match is None or text in ("", ":") or (match[2] is None and match[3] is not None):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected steps such as 100:200, 100:, :200 or 100")
    first = None if match[1] is None else int(match[1])
    last = first if match[2] is None else None if match[3] is None else int(match[3])
    if first is not None and last is not None and last < first:
        raise argparse.ArgumentTypeError(f"got {text!r}, which ends before it begins: {last}:{first}")
    return first, last


def time_ns(text: str) -> int:
    """Parses a point in time; returns Unix nanoseconds."""
    moment = text
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            seconds, _, fraction = text.partition(".")
            return int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0") or 0)
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?", text):
            moment = f"{datetime.now():%Y-%m-%d}T{text:0>5}"
        at = datetime.fromisoformat(moment)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a time such as 2026-11-21T20:15:00, 20:15:00 or 1795291200.5"
        ) from None
    whole = at.replace(microsecond=0).timestamp()
    return int(whole) * 10**9 + at.microsecond * 1000
