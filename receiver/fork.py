"""Resets the state of all packages in a forked child, in a fixed order.

A child process has none of its parent's threads, and threads of the parent may hold its locks. Queued messages and
open files belong to the parent, which delivers and closes them. Each module registers its function next to the state.
"""

from __future__ import annotations

import enum
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Stage(enum.IntEnum):
    """Stages of the reset: a package drops its state before the packages that it imports renew theirs."""

    PROGRAM = enum.auto()
    """hostcallback: running programs, dispatching threads."""
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
    """Registers a function to call in every child that is forked from now on.

    The thread that forked calls the functions of one stage in the order of their registration. An error of one
    function is printed, and the others are called.
    """
    _functions[stage].append(function)


def _after_fork_in_child() -> None:
    for stage in Stage:
        for function in _functions[stage]:
            try:
                function()
            # The others are reset all the same. Printed, since the parent's threads may have held a log's lock.
            except Exception:
                print("hostcallback: part of a forked child could not be reset:", file=sys.stderr)
                traceback.print_exc()


os.register_at_fork(after_in_child=_after_fork_in_child)
