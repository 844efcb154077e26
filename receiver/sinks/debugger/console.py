"""The console of a debugger, for commands and answers: a terminal, a notebook, or the streams of the user."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hostcallback.receiver.errors import BreakpointError

INTERRUPT = "\x03"
"""The character of Ctrl-C."""


class SupportsReadline(Protocol):
    """A stream from which commands can be read."""

    def readline(self) -> str:
        """Returns the next line with its line end; an empty text at the end of the input."""


class SupportsWriteAndFlush(Protocol):
    """A stream to which answers can be written."""

    def write(self, text: str, /) -> Any:
        """Writes a text."""

    def flush(self) -> Any:
        """Shows the text written so far."""


class Console:
    """A function that reads lines, and a stream for answers.

    Attributes:
        read: shows a prompt and returns a line without its line end; raises EOFError at the end of the input.
        stdout: stream for answers.
    """

    def __init__(self, read: Callable[[str], str], stdout: Any) -> None:
        """Makes a console; see the attributes."""
        self.read = read
        self.stdout = stdout


def open_console(stdin: SupportsReadline | None, stdout: SupportsWriteAndFlush | None, where: str) -> Console:
    """Returns the console for these streams; without `stdin`, for the notebook or the terminal of the process.

    Raises:
        BreakpointError: `stdin` is None and the process has neither a notebook nor a terminal. The text has `where`.
    """
    out: Any = sys.stdout if stdout is None else stdout
    if stdin is not None:
        return Console(_reader(stdin, out), out)
    notebook = _notebook_input()
    if notebook is not None:
        return Console(_asking(notebook, where), out)
    terminal: Any = sys.stdin
    missing = _why_no_terminal(terminal)
    if missing:
        raise BreakpointError(
            f"hcb.breakpoint stopped at {where}, and cannot read commands: {missing}, expected a terminal. Run "
            "the program in a terminal (with pytest: -s), give commands with hcb.breakpoint(stdin=...), or remove the "
            "breakpoint"
        )
    if stdout is not None:
        return Console(_reader(terminal, out), out)
    return Console(_ask_terminal, out)


def _ask_terminal(prompt: str) -> str:
    # Loading readline makes `input` edit lines and remember them.
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind(r'"\C-c": "\C-v\C-c\C-j"')  # a typed Ctrl-C (see below) ends the line
    if threading.current_thread() is threading.main_thread():
        return input(prompt)
    with _interrupt_is_typed(sys.stdin.fileno()):
        line = input(prompt)
    if INTERRUPT in line:
        raise KeyboardInterrupt
    return line


@contextlib.contextmanager
def _interrupt_is_typed(terminal: int) -> Iterator[None]:
    # Python runs signal handlers on the main thread, which waits for the program, which waits for the user. So Ctrl-C
    # would take effect after the last stop. Here the terminal passes it as a character of the line.
    try:
        import termios
    except ImportError:  # not a POSIX system
        yield
        return
    before = termios.tcgetattr(terminal)
    changed = termios.tcgetattr(terminal)
    changed[6][termios.VINTR] = bytes([os.fpathconf(terminal, "PC_VDISABLE")])
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _reader(stdin: SupportsReadline, stdout: SupportsWriteAndFlush) -> Callable[[str], str]:
    def read(prompt: str) -> str:
        stdout.write(prompt)
        stdout.flush()
        line = stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    return read


def _asking(ask: Callable[[str], str], where: str) -> Callable[[str], str]:
    def read(prompt: str) -> str:
        try:
            return ask(prompt)
        except (EOFError, KeyboardInterrupt):
            raise
        except Exception as error:  # a frontend without input, such as a program that executes notebooks
            raise BreakpointError(
                f"hcb.breakpoint stopped at {where}, and the notebook cannot be asked there: {error}. Run it in a "
                "notebook with input, or give commands with hcb.breakpoint(stdin=...)"
            ) from error

    return read


def _notebook_input() -> Callable[[str], str] | None:
    """Returns the input function of the IPython kernel if this process is one; else None."""
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    kernel = getattr(get_ipython(), "kernel", None) if get_ipython is not None else None
    ask: Callable[[str], str] | None = getattr(kernel, "raw_input", None)
    return ask


def _why_no_terminal(stdin: Any) -> str | None:
    if stdin is None:
        return "the process has no standard input"
    if getattr(stdin, "closed", False):
        return "the standard input is closed"
    try:
        terminal = stdin.isatty()
    except Exception as error:
        return f"the standard input cannot be examined ({error})"
    return None if terminal else "the standard input is not a terminal"
