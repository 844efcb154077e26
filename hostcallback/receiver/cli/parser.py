"""The parser of the `hcb` command line: its commands, and suggestions for mistyped words."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

COMMANDS: dict[str, str] = {
    "cat": "show the messages of a tap log",
    "tail": "show the last messages of a tap log, and follow it",
    "stats": "count the messages of a tap log, by tap",
    "errors": "show the failed checks, by line, and the exceptions of tap functions",
    "replay": "deliver the messages of a tap log once more",
    "diff": "show the first message in which two runs differ",
    "convert": "write a tap log as .npz, Parquet, TensorBoard events or a trace for Perfetto",
    "collect": "receive the messages that many processes forward, store them, and show them",
    "recover": "show the last messages of killed processes, from a flight recorder",
    "ctl": "set rules for the taps of a running process: every n-th, a rate, truncated arrays, off and on",
    "reproduce": "run a step that failed once more, from a failure capsule",
    "run": "run a script whose jax.debug.print, jax.debug.callback and io_callback go through hostcallback",
    "top": "show rates, bytes, queues, time, drops and errors of the taps of a running process",
    "ui": "show live taps, errors, devices and runs on a page in a browser",
    "completion": "print the script that completes hcb in a shell: bash, zsh, fish or tcsh",
    "help": "show the help of a command",
}
"""The commands in the order of the help: the module in `commands/` or `with_jax/`, and its summary.

A command's module has `configure(parser)`, which adds its arguments, and `run(arguments)`, which returns the exit
status; and `FAILED` if its status for errors is not 1.
"""

WITH_JAX = {"reproduce", "run"}

DESCRIPTION = (
    "Reads tap logs and flight recorders, and controls taps of running programs. "
    "Only run and reproduce need JAX."
)
FAILED = 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest what a mistyped command, option or value may have meant."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with the usage, the error and a suggestion."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if choice:
            known = COMMANDS if "COMMAND" in message else re.findall(r"[\w-]+", choice[2])
            message += suggestion(choice[1], known)
        elif unknown:
            message += suggestion(unknown[1].partition("=")[0], self._option_string_actions)
        super().error(message)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known words that resemble a mistyped one; empty if there are none."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {near[0]}?" if near else ""


def make_parser(*chosen: str | None) -> Parser:
    """Makes the parser. Only the chosen commands have their arguments: some take long to import."""
    parser = Parser(prog="hcb", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"hcb (hostcallback) {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        added = commands.add_parser(name, help=summary, description=summary)
        if name in chosen:
            room = "with_jax" if name in WITH_JAX else "commands"
            module = importlib.import_module(f"hostcallback.receiver.cli.{room}.{name}")
            module.configure(added)
            added.set_defaults(command=added, run=module.run, failed=getattr(module, "FAILED", FAILED))
    return parser


def command_parsers(parser: Parser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _version() -> str:
    try:
        return version("hostcallback")
    except PackageNotFoundError:
        return "not installed"
