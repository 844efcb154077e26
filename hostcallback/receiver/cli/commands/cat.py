"""`hcb cat`: shows the messages of a log, one line each."""

from __future__ import annotations

import argparse
import sys

from hostcallback.receiver.cli.arguments import add_log, add_selection, add_shards, count, open_log, selection
from hostcallback.receiver.cli.output.messages import Show, report_damage, show_progress
from hostcallback.receiver.cli.output.tables import report_unmatched
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage


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
    reader = open_log(arguments.log, arguments.of_run)
    wanted = selection(arguments)
    several = len(reader.writers) > 1
    show_progress(reader, prints=True)
    show = Show(as_json=arguments.json, full=arguments.full)
    damaged: list[Damage] = []
    shown = 0
    for record in reader.records(wanted) if arguments.shards else reader.values(wanted):
        if isinstance(record, Damage):
            damaged.append(record)
        elif not isinstance(record, LoggedMessage):
            show.lost(record, several=several)
        elif shown == arguments.limit:
            break
        else:
            show.message(record, several=several)
            shown += 1
    sys.stdout.flush()
    return report_damage(damaged) or (
        0 if shown or arguments.limit == 0 else report_unmatched(reader, wanted)
    )
