"""Stops at breakpoints, of any thread and device: one at a time has the debugger, the others wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hostcallback.receiver import fork
from hostcallback.receiver.errors import BreakpointQuit
from hostcallback.receiver.sinks.debugger.console import open_console
from hostcallback.receiver.sinks.debugger.debugger import Debugger, Frame


class DebugSession:
    """One stop that has the debugger. As a context: the time in which it runs code of the user."""

    def __init__(self) -> None:
        self.evaluating = False

    def __enter__(self) -> None:
        with _changed:
            self.evaluating = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _changed:
            self.evaluating = False
            _changed.wait_for(lambda: _stack[-1] is self)


_changed = threading.Condition()  # protects everything below
_stack: list[
    DebugSession
] = []  # the last one has the debugger; one below another waits for what it evaluates
_quits = 0


def open_session(
    frames: Sequence[Frame], what: str, where: str, stdin: Any = None, stdout: Any = None
) -> None:
    """Opens the debugger, when it is this stop's turn, and waits until the user lets the program go on.

    A stop in code that the user evaluates in the debugger has its turn at once: the debugger waits for it.

    Args:
        frames: innermost first, at least one.
        what: which stop this is, for the user.
        where: the user's line.
        stdin: what to read commands from; see `open_console`.
        stdout: what to write answers to.

    Raises:
        BreakpointQuit: the user ended the program, or another one while this stop waited for its turn.
        BreakpointError: there is nobody to ask.
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
    """Forgets every stop: for a forked child, whose parent's threads do not exist."""
    global _changed
    _changed = threading.Condition()
    _stack.clear()


fork.in_child(fork.Stage.SINKS, reset)


def _take_turn(where: str) -> DebugSession:
    turn = DebugSession()
    with _changed:
        before = _quits
        inside = _stack[-1] if _stack and _stack[-1].evaluating else None
        _changed.wait_for(
            lambda: (
                _quits != before
                or not _stack
                or (_stack[-1] is inside and inside is not None and inside.evaluating)
            )
        )
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
        _quits += quitted
        _changed.notify_all()
