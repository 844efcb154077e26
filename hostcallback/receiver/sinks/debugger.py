"""Breakpoints: the debugger on the frames of a waiting program, its console, and its sessions, one at a time."""

from __future__ import annotations

import cmd
import contextlib
import math
import os
import pprint
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from hostcallback.receiver import processes
from hostcallback.receiver.errors import BreakpointError, BreakpointQuit

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


LINES_AROUND = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a user's function at the time the program was traced.

    Attributes:
        file: the file's path as Python knows it.
        line: 1-based number of the frame's current line.
        function: the function's qualified name.
        source: the file's lines; empty if the file does not exist.
        variables: its local variables. Assignments in the debugger change this dict.
        module_variables: its global variables.
    """

    file: str
    line: int
    function: str
    source: Sequence[str]
    variables: dict[str, Any]
    module_variables: Mapping[str, Any]

    def source_line(self) -> str:
        """Returns the text of the frame's current line."""
        return self.source[self.line - 1].strip() if 0 < self.line <= len(self.source) else "<no source>"


class Debugger(cmd.Cmd):
    """Asks for commands until one resumes or ends the program.

    Attributes:
        quitted: whether the user ended the program.
    """

    doc_header = "Commands (help <command> says more; anything else is evaluated as Python):"
    prompt = "(hcb) "

    def __init__(
        self,
        frames: Sequence[Frame],
        console: Console,
        evaluating: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        """Makes the debugger of one stop.

        Args:
            frames: the frames, innermost first, at least one.
            console: console for commands and answers.
            evaluating: context manager entered whenever user code runs; must be reusable.
        """
        super().__init__(stdout=console.stdout)
        self._console = console
        self._frames = frames
        self._evaluating = evaluating or contextlib.nullcontext()
        self._index = 0
        self._next_line: int | None = None  # the line at which `list` continues
        self.quitted = False

    def run(self) -> None:
        """Reads and runs commands. A KeyboardInterrupt on this thread cancels the line."""
        self._show_place()
        over = False
        while not over:
            try:
                try:
                    line = self._console.read(self.prompt)
                except EOFError:
                    self._say("")
                    line = "EOF"
                over = bool(self.onecmd(line))
            except KeyboardInterrupt:
                self._say("--KeyboardInterrupt--")
        self.stdout.flush()

    def default(self, line: str) -> None:
        """Evaluates an expression and prints its value, or executes a statement. A leading `!` marks Python code."""
        line = line.removeprefix("!").strip()
        try:
            compile(line, "<debugger>", "eval")
        except SyntaxError:
            self._try(lambda space: exec(line, space, self._frame.variables))
            return
        self._try(lambda space: self._show(eval(line, space, self._frame.variables)))

    def do_p(self, arg: str) -> None:
        """p expression: evaluates it with the frame's variables and prints the value."""
        self._try(lambda space: self._say(repr(eval(arg, space, self._frame.variables))))

    def do_pp(self, arg: str) -> None:
        """pp expression: evaluates it with the frame's variables and pretty-prints the value."""
        self._try(lambda space: self._say(pprint.pformat(eval(arg, space, self._frame.variables))))

    def do_up(self, arg: str) -> None:
        """u(p) [count]: goes to the caller's frame."""
        self._move(arg, 1)

    def do_down(self, arg: str) -> None:
        """d(own) [count]: goes to the frame that the current one called."""
        self._move(arg, -1)

    def do_where(self, arg: str) -> None:
        """w(here), bt: lists the frames, the innermost one last; an arrow marks the current one."""
        for index, frame in reversed([*enumerate(self._frames)]):
            self._say(f"{'>' if index == self._index else ' '} {_place(frame)}")
            self._say(f"-> {frame.source_line()}")

    def do_list(self, arg: str) -> None:
        """l(ist) [first[, last] | .]: shows the source around the frame's line, then further lines; `.` restarts."""
        frame = self._frame
        try:
            first, last = self._range(arg)
        except ValueError:
            self._say("*** expected line numbers, such as list 10, 20, or list .")
            return
        shown = range(max(first, 1), min(last, len(frame.source)) + 1)
        for number in shown:
            arrow = "->" if number == frame.line else "  "
            self._say(f"{number:4d} {arrow} {frame.source[number - 1].rstrip()}".rstrip())
        if not frame.source:
            self._say("<no source>")
        elif not shown:
            self._say("[EOF]")
        self._next_line = last + 1

    def do_continue(self, arg: str) -> bool:
        """c(ontinue): resumes the program until the next stop."""
        return True

    def do_quit(self, arg: str) -> bool:
        """q(uit), the end of the input (Ctrl-D): ends the waiting program with a BreakpointQuit."""
        self.quitted = True
        return True

    do_h = cmd.Cmd.do_help
    do_u = do_up
    do_d = do_down
    do_w = do_bt = do_where
    do_l = do_list
    do_c = do_cont = do_continue
    do_q = do_exit = do_EOF = do_quit

    def get_names(self) -> list[str]:
        """Returns the commands that help lists, without their short names."""
        short = {"do_h", "do_u", "do_d", "do_w", "do_l", "do_c", "do_cont", "do_q", "do_exit", "do_EOF"}
        return [name for name in super().get_names() if name not in short]

    @property
    def _frame(self) -> Frame:
        return self._frames[self._index]

    def _try(self, command: Any) -> None:
        frame = self._frame
        # Functions and comprehensions in evaluated code look up globals only, so the locals are merged into them.
        space = {**frame.module_variables, **frame.variables}
        try:
            with self._evaluating:
                command(space)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._say("*** " + traceback.format_exception_only(error)[-1].strip())

    def _show(self, value: Any) -> None:
        if value is not None:
            self._say(repr(value))

    def _move(self, arg: str, step: int) -> None:
        if arg and not arg.isdecimal():
            self._say(f"*** expected a number of frames, got {arg}")
            return
        end = len(self._frames) - 1 if step > 0 else 0
        if self._index == end:
            self._say("*** Oldest frame" if step > 0 else "*** Newest frame")
            return
        self._index = min(max(self._index + step * int(arg or 1), 0), len(self._frames) - 1)
        self._next_line = None
        self._show_place()

    def _range(self, arg: str) -> tuple[int, int]:
        if arg and arg != ".":
            first, _, last = arg.partition(",")
            begin = int(first)
            return begin, int(last) if last.strip() else begin + 2 * LINES_AROUND
        if arg or self._next_line is None:
            return self._frame.line - LINES_AROUND, self._frame.line + LINES_AROUND
        return self._next_line, self._next_line + 2 * LINES_AROUND

    def _show_place(self) -> None:
        self._say(f"> {_place(self._frame)}")
        self._say(f"-> {self._frame.source_line()}")

    def _say(self, text: str) -> None:
        self.stdout.write(text + "\n")


def _place(frame: Frame) -> str:
    return f"{frame.file}({frame.line}){frame.function}()"


INSIDE_SEC = 0.5
"""Seconds after which code that the user evaluates counts as waiting for a stop that waits for its turn."""


class DebugSession:
    """One stop at a breakpoint. As a context manager it marks the time in which user code runs in its debugger."""

    def __init__(self) -> None:
        self._evaluates_since = math.inf
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        with _changed:
            self._evaluates_since, self._thread = time.monotonic(), threading.current_thread()
            _changed.notify_all()

    def goes_on(self) -> None:
        """Starts the time again: a stop in its code is over."""
        if self._thread is not None:
            self._evaluates_since = time.monotonic()

    def wait_sec(self) -> float:
        """Seconds after which a stop of this thread is taken for one in the code that the user evaluates."""
        if self._thread is threading.current_thread():
            return 0.0
        return max(self._evaluates_since + INSIDE_SEC - time.monotonic(), 0.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _changed:
            self._evaluates_since, self._thread = math.inf, None
            _changed.wait_for(lambda: _stack[-1] is self)


_changed = threading.Condition()  # protects everything below
_stack: list[
    DebugSession
] = []  # the last session has the debugger; each below it evaluates the code that stopped at the next one
_quits = 0


def open_session(
    frames: Sequence[Frame], what: str, where: str, stdin: Any = None, stdout: Any = None
) -> None:
    """Opens the debugger when it is this stop's turn, and waits until the user resumes the program.

    A stop in code that the user evaluates in the debugger gets its turn then, because the debugger waits for it. On
    another thread it cannot be told from a stop of another device, so any stop that waits gets its turn when the code
    has run for `INSIDE_SEC`.

    Args:
        frames: the frames, innermost first, at least one.
        what: description of this stop for the user.
        where: the user's source line.
        stdin: stream from which commands are read; see `open_console`.
        stdout: stream to which answers are written.

    Raises:
        BreakpointQuit: the user ended this program, or another one while this stop waited for its turn.
        BreakpointError: there is no console; see `open_console`.
    """
    console = open_console(stdin, stdout, where)
    turn = _take_turn(where)
    try:
        print(f"hostcallback: {what}", file=console.stdout)
        debugger = Debugger(frames, console, turn)
        debugger.run()
        if debugger.quitted:
            raise BreakpointQuit(f"the program was ended by q(uit) at the breakpoint at {where}")
    except BreakpointQuit:
        _leave(turn, quitted=True)
        raise
    except BaseException:
        _leave(turn)
        raise
    _leave(turn)


def reset() -> None:
    """Drops all sessions, for a forked child, which does not have the parent's threads."""
    global _changed
    _changed = threading.Condition()
    _stack.clear()


processes.in_child(processes.Stage.SINKS, reset)


def _take_turn(where: str) -> DebugSession:
    turn = DebugSession()
    with _changed:
        before = _quits
        while _stack and _quits == before and (wait := _stack[-1].wait_sec()):
            _changed.wait(None if math.isinf(wait) else wait)
        if _quits != before:
            raise BreakpointQuit(
                f"the program was ended while it waited at the breakpoint at {where}: by q(uit) at a stop before it"
            )
        _stack.append(turn)
    return turn


def _leave(turn: DebugSession, *, quitted: bool = False) -> None:
    global _quits
    with _changed:
        _stack.remove(turn)
        if _stack:
            _stack[-1].goes_on()
        _quits += quitted
        _changed.notify_all()
