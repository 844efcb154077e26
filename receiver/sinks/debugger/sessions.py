"""Sessions of the debugger. Breakpoints of any thread and device open one at a time; the others wait."""

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
    """One stop at a breakpoint. As a context manager it marks the time in which user code runs in its debugger."""

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
] = []  # the last session has the debugger; each below it evaluates the code that stopped at the next one
_quits = 0


def open_session(
    frames: Sequence[Frame], what: str, where: str, stdin: Any = None, stdout: Any = None
) -> None:
    """Opens the debugger when it is this stop's turn, and waits until the user resumes the program.

    A stop in code that the user evaluates in the debugger gets its turn at once, because the debugger waits for it.

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
