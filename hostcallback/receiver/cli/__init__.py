"""The `hcb` command: reads tap logs and flight recorders, and controls taps of running programs. Works without JAX."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from hostcallback.receiver.cli.output.tables import BOLD, RED, has_color, painted
from hostcallback.receiver.cli.parser import COMMANDS, FAILED, make_parser
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.text import printable

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit statuses, besides FAILED: wrong arguments, and a shell's statuses for a process that a signal ended."""

AGAIN_SEC = 0.01
"""Seconds after which a Ctrl-C that Python has dropped is repeated."""

__all__ = ["BROKEN_PIPE", "COMMANDS", "FAILED", "INTERRUPTED", "USAGE", "CommandError", "main", "script"]


class CommandError(HostCallbackError):
    """A command cannot continue; the text is for its user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. Errors are one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(next((word for word in given if word in COMMANDS), None))
    try:
        if not given:
            parser.print_help(sys.stderr)
            return USAGE
        parsed, unknown = parser.parse_known_args(given)
        if not hasattr(parsed, "command"):
            parser.error(
                f"unrecognized arguments: {' '.join(unknown)}"
                if unknown
                else "the following arguments are required: COMMAND"
            )
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
        mark = painted("hcb:", BOLD, RED) if has_color(sys.stderr) else "hcb:"
        print(mark, _one_line(error), file=sys.stderr)
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


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    # Python drops an exception that is raised in a destructor or a weak reference's callback, also that of Ctrl-C.
    # A moment later the main thread is most likely elsewhere; if not, this is called again.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(AGAIN_SEC, os.kill, [os.getpid(), signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(unraisable)


def script() -> NoReturn:
    """Entry point of the console script."""
    sys.unraisablehook = _interrupt_again
    if sys.stdout is None:  # closed by the parent process: writes fail, as in any program
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from hostcallback.receiver.cli.commands.completion import answer

        answer()
    sys.exit(main())
