"""What each room does in a forked child, in one order over all rooms.

A child has no thread of its parent's, its locks may be held by threads that do not exist there, and what is queued or
open is the parent's to deliver. Modules register a function for it where they define the state.
"""

from __future__ import annotations

import enum
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Stage(enum.IntEnum):
    """When a function is called in a child: a room forgets its state before the rooms below it renew theirs."""

    PROGRAM = enum.auto()
    """hostcallback: programs that run, threads that dispatch."""
    REMOTE = enum.auto()
    """Spools, connections, the SIGTERM thread."""
    CONTROL = enum.auto()
    """The control socket and the rule file."""
    RUNTIME = enum.auto()
    """Receivers and their rules."""
    TAPLOG = enum.auto()
    """Log writers and their segments."""
    SINKS = enum.auto()
    """Debugger sessions, assembly of shards."""
    NATIVE = enum.auto()
    """The rings and locks of the native library."""


_functions: dict[Stage, list[Callable[[], Any]]] = {stage: [] for stage in Stage}


def in_child(stage: Stage, function: Callable[[], Any]) -> None:
    """Has a function called in every child that is forked from now on.

    Functions of one stage are called in the order in which they were registered, on the thread that forked. What one of
    them raises is printed, and the others are called.
    """
    _functions[stage].append(function)


def _after_fork_in_child() -> None:
    for stage in Stage:
        for function in _functions[stage]:
            try:
                function()
            except Exception:
                print("hostcallback: part of a forked child could not be reset:", file=sys.stderr)
                traceback.print_exc()


os.register_at_fork(after_in_child=_after_fork_in_child)
