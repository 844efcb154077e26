"""The debugger that a breakpoint opens: commands on the frames of a waiting program."""

from __future__ import annotations

import cmd
import pprint
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.sinks.debugger.console import Console

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
        evaluating: AbstractContextManager[Any] | None = None,
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
        self._evaluating = evaluating or nullcontext()
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
