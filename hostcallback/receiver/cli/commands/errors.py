"""`hcb errors`: shows the failed checks by line, as the program would have reported them."""

from __future__ import annotations

import argparse
import json
import sys

from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection
from hostcallback.receiver.cli.output.messages import make_safe
from hostcallback.receiver.replayer.replay import Replay
from hostcallback.receiver.taplog.render import plain_value
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
    for number, check in enumerate(replayed.failed_checks):
        if arguments.json:
            print(json.dumps(plain_value(check.as_dict()), allow_nan=False))
        else:
            print(f"{chr(10) if number else ''}{printable_report(check.report())}")
    if not replayed.failed_checks and not arguments.json:
        by_step = (log.wanted.first_step, log.wanted.last_step) != (None, None)
        print(
            f"no check failed{' in these steps; failures of an unknown step are left out' if by_step else ''}"
        )
    sys.stdout.flush()
    log.damaged += replayed.damaged
    return log.status(replayed.failed_checks)
