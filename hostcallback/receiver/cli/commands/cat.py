"""`hcb cat`: shows the messages of a log, one line each."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection, add_shards, count
from hostcallback.receiver.cli.output.messages import Show, warning
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.text import printable

MAX_NAMED = 20
"""Checks of which it is said at the end that failures of them have no line."""


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
    folded: Counter[str] = Counter()
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
            if record.folded and (record.message.consumer.name in folded or len(folded) < MAX_NAMED):
                folded[record.message.consumer.name] += record.folded
    sys.stdout.flush()
    for name, count_of in folded.items():
        print(
            warning(
                f"{printable(name)}: {count_of:,} more failures, which were only counted: they have no line"
            ),
            file=sys.stderr,
        )
    return log.status(shown or arguments.limit == 0)
