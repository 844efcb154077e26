"""The `hcb` command: reads tap logs and flight recorders, and controls taps of running programs. Works without JAX."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.terminal import printable

COMMANDS: dict[str, str] = {
    "cat": "show the messages of a tap log",
    "tail": "show the last messages of a tap log, and follow it",
    "stats": "count the messages of a tap log, by tap",
    "errors": "show the failed checks, by line",
    "replay": "deliver the messages of a tap log once more",
    "diff": "show the first message in which two runs differ",
    "convert": "write a tap log as JSON lines, .npz, Parquet, TensorBoard events or a trace for Perfetto",
    "attach": "show here what the taps of a running process print",
    "collect": "receive the messages that many processes forward, store them, and show them",
    "recover": "show the last messages of killed processes, from a flight recorder",
    "ctl": "set rules for the taps of a running process: every n-th, a rate, truncated arrays, off and on",
    "run": "run a script whose jax.debug.print, jax.debug.callback and io_callback go through hostcallback",
    "top": "show rates, bytes, queues, time, drops and errors of the taps of a running process",
}
"""The commands in the order of the help: the module in this package, and its summary.

A command's module has `configure(parser)`, which adds its arguments, and `run(arguments)`, which returns the exit
status; and `FAILED` if its status for errors is not 1.
"""

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: an error, wrong arguments, and a shell's statuses for a process that a signal ended."""


class CommandError(HostCallbackError):
    """A command cannot continue; the text is for its user."""


class _Parser(argparse.ArgumentParser):
    # Suggests what a mistyped command or option may have meant.

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        if mistyped:
            known = COMMANDS if "COMMAND" in message else self._option_string_actions
            word = (mistyped[1] or mistyped[2]).partition("=")[0]
            near = difflib.get_close_matches(word, known, n=1)
            message += f". Did you mean {near[0]}?" if near else ""
        super().error(message)


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="hcb", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hcb (hostcallback) {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        added = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:  # the other modules are not loaded: some take long
            module = importlib.import_module(f"hostcallback.receiver.cli.commands.{name}")
            module.configure(added)
            added.set_defaults(command=added, run=module.run, failed=getattr(module, "FAILED", FAILED))
    return parser


def _version() -> str:
    try:
        return version("hostcallback")
    except PackageNotFoundError:
        return "not installed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. Errors are one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(next((word for word in given if word in COMMANDS), None))
    try:
        parsed, unknown = parser.parse_known_args(given)
        if unknown:
            parsed.command.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        _give_output_up()  # the program that read the output has ended, as `head` does
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (HostCallbackError, OSError, MemoryError) as error:
        print(f"hcb: {_one_line(error)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # the output itself has failed
            _give_output_up()
        return int(parsed.failed)
    return status


def _give_output_up() -> None:
    # Python flushes the buffered output again at exit: that must not raise a second error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {printable(str(error)) or 'the data are too large for this machine'}"
    return printable(str(error) or type(error).__name__)


def script() -> NoReturn:
    """Entry point of the console script."""
    if sys.stdout is None:  # closed by the parent process: writes fail, as in any program
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main())
