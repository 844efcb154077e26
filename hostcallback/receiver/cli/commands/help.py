"""`hcb help`: shows the help of a command."""

from __future__ import annotations

import argparse

from hostcallback.receiver.cli.parser import COMMANDS, command_parsers, make_parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "of", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="without it, all are listed"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    parser = make_parser(arguments.of)
    (parser if arguments.of is None else command_parsers(parser)[arguments.of]).print_help()
    return 0
