"""`hcb tail`: shows the last messages of a log and, with -f, those that follow."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from hostcallback.receiver.cli import CommandError, arguments as shared
from hostcallback.receiver.cli.output.messages import Show, report_damage
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.follow import Follower, Found
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import ALL, Selection

POLL_SEC = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("log", nargs="*", metavar="LOG", help="a folder with a tap log, or segments of one")
    group = parser.add_argument_group("or the streams of a collector")
    group.add_argument("--from", dest="collector", metavar="HOST:PORT", help="follow it live, as with -f")
    runs = "of this run, a pattern, or all (default: of a collector all, of a LOG the last, and those that follow it)"
    shared.add_reaching(group, runs=runs, default=None)
    parser.add_argument(
        "-n", "--lines", type=shared.count, default=10, metavar="N", help="the last N messages (default 10)"
    )
    follow = "then follow the log as it grows, with new segments and processes, until interrupted"
    parser.add_argument("-f", "--follow", action="store_true", help=follow)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as from `hcb cat`")
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    shared.add_shards(parser)
    shared.add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if bool(arguments.log) == bool(arguments.collector):
        raise CommandError("give a LOG to read, or a collector with --from HOST:PORT")
    wanted = shared.selection(arguments)
    if arguments.collector:
        return _follow_collector(arguments, wanted)
    follower = Follower(
        arguments.log, wanted, wait=arguments.follow, shards=arguments.shards, run=arguments.of_run
    )
    show = Show(as_json=arguments.json, full=arguments.full)
    last = follower.last(arguments.lines)
    if arguments.of_run is None:
        shared.name_other_runs(follower.runs, {writer.run for writer in follower.writers})
    status = _show(follower, show, last)
    if not last and arguments.lines and not arguments.follow:
        status = status or shared.report_nothing(LogReader(arguments.log, run=arguments.of_run), wanted)
    while arguments.follow:
        status = _show(follower, show, follower.poll()) or status
        time.sleep(POLL_SEC)
    return status


def _follow_collector(arguments: argparse.Namespace, wanted: Selection) -> int:
    from hostcallback.receiver.remote.follow_client import (  # here, because grpc takes long to import
        ANSWER_SEC,
        RemoteLog,
    )

    reached = shared.reaching(arguments.collector, arguments)
    show = Show(as_json=arguments.json, full=arguments.full)
    with RemoteLog(reached, arguments.of_run or "*") as log:
        log.wait(ANSWER_SEC)
        follower = Follower([log.folder], wanted, wait=True, shards=arguments.shards, run=ALL)
        _show(follower, show, follower.last(arguments.lines))
        while True:
            finished = log.finished()
            _show(follower, show, follower.poll())
            log.remove(finished)
            log.check()
            time.sleep(POLL_SEC)


def _show(follower: Follower, show: Show, found: Iterable[Found]) -> int:
    damaged: list[Damage] = []
    for item in found:
        if isinstance(item, Damage):
            damaged.append(item)
        elif isinstance(item, LoggedMessage):
            show.message(item, among=follower.writers)
        else:
            show.lost(item, among=follower.writers)
    sys.stdout.flush()
    return report_damage(damaged)
