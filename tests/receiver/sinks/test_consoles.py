"""Where a breakpoint reads its commands: a terminal, a notebook or streams, and whose turn it is."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import hostcallback as hcb
from hostcallback.receiver.sinks.debugger import Frame, open_console, open_session
from scripted import Script
from threads import in_another_thread, wait_for

pty = pytest.importorskip("pty", reason="needs the terminals of POSIX")
termios = pytest.importorskip("termios", reason="needs the terminals of POSIX")

PROMPT = "(hcb) "


class Terminal:
    """A terminal that is the standard input of this process."""

    def __init__(self, keyboard: int, terminal: int, bound: list[str]) -> None:
        self._keyboard, self.number, self.bound = keyboard, terminal, bound

    def type(self, text: bytes) -> None:
        os.write(self._keyboard, text)

    @property
    def interrupt(self) -> bytes:
        """The character that interrupts."""
        found: bytes = termios.tcgetattr(self.number)[6][termios.VINTR]
        return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal; `readline` is left as it is."""
    keyboard, number = pty.openpty()
    bound: list[str] = []
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(parse_and_bind=bound.append))
    with open(number, closefd=True) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield Terminal(keyboard, number, bound)
    os.close(keyboard)


def test_a_terminal_is_asked_line_by_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    console = open_console(None, None, "here")
    assert console.stdout is sys.stdout
    before = termios.tcgetattr(terminal.number)
    terminal.type(b"x + 1\n")
    assert console.read(PROMPT) == "x + 1"
    assert capsys.readouterr().out == PROMPT
    assert termios.tcgetattr(terminal.number) == before
    assert terminal.bound == [r'"\C-c": "\C-v\C-c\C-j"']


def test_on_another_thread_an_interrupt_is_typed(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    console = open_console(None, None, "here")
    before = termios.tcgetattr(terminal.number)
    assert terminal.interrupt == b"\x03"

    def typed(text: bytes) -> str:
        def type_it() -> None:
            wait_for(lambda: terminal.interrupt == off, "a terminal that passes interrupts on")
            terminal.type(text)

        typist = threading.Thread(target=type_it)
        typist.start()
        try:
            return console.read(PROMPT)
        finally:
            typist.join(60)

    def read() -> None:
        assert typed(b"p x\n") == "p x"
        assert termios.tcgetattr(terminal.number) == before
        with pytest.raises(KeyboardInterrupt):
            typed(b"abc\x03\n")
        assert termios.tcgetattr(terminal.number) == before

    off = bytes([os.fpathconf(terminal.number, "PC_VDISABLE")])
    in_another_thread(read)
    assert capsys.readouterr().out == PROMPT * 2


def test_a_terminal_with_a_stream_for_answers_gets_no_prompt(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    console = open_console(None, script, "here")
    terminal.type(b"x\r\n")
    assert (console.read(PROMPT), script.text, console.stdout) == ("x", PROMPT, script)
    assert capsys.readouterr().out == ""


def test_the_end_of_a_stream_of_commands_is_told() -> None:
    console = open_console(io.StringIO("  x \r\n\ny"), io.StringIO(), "here")
    assert [console.read(PROMPT) for _ in range(3)] == ["  x ", "", "y"]
    with pytest.raises(EOFError):
        console.read(PROMPT)
    assert console.stdout.getvalue() == PROMPT * 4


class Odd:
    """A standard input that cannot tell what it is."""

    closed = False

    def isatty(self) -> bool:
        raise OSError("torn off")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("stdin", "why"),
    [
        (None, "the process has no standard input"), (closed(), "the standard input is closed"),
        (Odd(), "the standard input cannot be examined (torn off)"),
        (io.StringIO("c\n"), "the standard input is not a terminal"),
    ],
)  # fmt: skip
def test_without_a_terminal_a_breakpoint_says_why(
    monkeypatch: pytest.MonkeyPatch, stdin: Any, why: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    told = f"hcb.breakpoint stopped at here, and cannot read commands: {why}, expected a terminal. "
    with pytest.raises(hcb.BreakpointError, match=f"^{re.escape(told)}"):
        open_console(None, None, "here")


@pytest.mark.parametrize("error", [EOFError, KeyboardInterrupt, ValueError])
def test_the_end_and_an_interrupt_of_a_notebook_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def ask(prompt: str) -> str:
        if prompt != PROMPT:
            raise error("no input")
        return "x"

    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=SimpleNamespace(raw_input=ask)))
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]
    console = open_console(None, None, "here")
    assert console.read(PROMPT) == "x"
    expected = hcb.BreakpointError if error is ValueError else error
    text = (
        "stopped at here, and the notebook cannot be asked there: no input" if error is ValueError else "no"
    )
    with pytest.raises(expected, match=text):
        console.read("")


def test_without_a_kernel_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    monkeypatch.setitem(
        sys.modules,
        "IPython",
        SimpleNamespace(get_ipython=lambda: None),  # type: ignore[arg-type]
    )
    terminal.type(b"c\n")
    assert open_console(None, Script(), "here").read(PROMPT) == "c"


class Waited(Script):
    """Types its commands when another stop waits for its turn."""

    def __init__(self, *commands: str, until: Callable[[], bool]) -> None:
        super().__init__(*commands)
        self._until = until

    def readline(self) -> str:
        wait_for(self._until, "the stop that waits")
        return super().readline()


@pytest.mark.parametrize("command", ["q", "c"])
def test_a_stop_that_waits_for_its_turn_ends_with_the_program_of_the_other(command: str) -> None:
    ended: list[BaseException | None] = []

    def stop(script: Script, where: str) -> BaseException | None:
        frames = [Frame("train.py", 3, "step", [], {"x": 5}, {})]
        try:
            open_session(frames, f"stop at {where}", where, script, script)
        except hcb.BreakpointQuit as error:
            return error
        return None

    def waits() -> bool:
        # The other one begins when this one has the turn.
        if other.ident is None:
            other.start()
        frame = sys._current_frames().get(other.ident or 0)
        names = [f.f_code.co_name for f, _ in traceback.walk_stack(frame)] if frame else []
        return names[:1] == ["wait"] and "_take_turn" in names

    second = Script("x", "c")
    other = threading.Thread(target=lambda: ended.append(stop(second, "there")))
    own = stop(Waited(command, until=waits), "here")
    other.join(60)
    if command == "c":
        assert (own, ended, second.answers) == (None, [None], ["5", ""])
        return
    assert str(own) == "the program was ended by q(uit) at the breakpoint at here"
    assert [str(error) for error in ended] == [
        "the program was ended while it waited at the breakpoint at there: by q(uit) at a stop before it"
    ]
    assert second.text == ""
    third = Script("x", "c")  # the next stop is not concerned
    assert (stop(third, "later"), third.answers) == (None, ["5", ""])
