"""`hcb cat`: shows the messages of a log, one line each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection, add_shards, count
from hostcallback.receiver.cli.output.messages import Show
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per line; keys are in docs/tap-log.md"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    parser.add_argument("--limit", type=count, metavar="N", help="stop after N messages")
    add_shards(parser)
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    log = SelectedLog(arguments, prints=True)
    among = log.reader.writers
    show = Show(as_json=arguments.json, full=arguments.full)
    shown = 0
    read = log.reader.records if arguments.shards else log.reader.values
    records: Iterator[LoggedMessage | LostNote] = log.intact(read(log.wanted))
    for record in records:
        if not isinstance(record, LoggedMessage):
            show.lost(record, among=among)
        elif shown == arguments.limit:
            break
        else:
            show.message(record, among=among)
            shown += 1
    sys.stdout.flush()
    return log.status(shown or arguments.limit == 0)
