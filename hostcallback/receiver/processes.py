"""Processes: resets of state in a forked child, whether another process is alive, and the name of this one's run.

A child process has none of its parent's threads, and threads of the parent may hold its locks. Queued messages and
open files belong to the parent, which delivers and closes them. Each module registers its function next to the state.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import getpass
import os
import re
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hostcallback.receiver import environment


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

_at_end: list[Callable[[], Any]] = []


def at_end(function: Callable[[], Any]) -> None:
    """Registers a function to call at the end of the process, after the exit handlers that deliver the last messages.

    Exit handlers run in the reverse order of their registration, and this module is imported before those that register
    one. So the module of `function` may be imported at any time.
    """
    _at_end.append(function)


@atexit.register
def _end() -> None:
    for function in _at_end:
        try:
            function()
        except Exception:  # the others are called all the same
            print("hostcallback: part of the process's end failed:", file=sys.stderr)
            traceback.print_exc()


def is_alive(pid: int) -> bool:
    """Whether a process with that id exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        # A zombie takes signals, but it has ended: its state is Z. The state follows the command's name, which is in
        # parentheses and may contain any character. Without /proc a zombie counts as alive.
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] not in "ZX"
    except (ProcessLookupError, OverflowError):  # OverflowError: no system has such an id
        return False
    except PermissionError:  # it exists, and belongs to another user
        return True
    return True


MAX_CHARS = 64

EXPECTED = "up to 64 letters, digits, '.', '-' and '_', beginning with a letter or digit"

_RUN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_CHARS - 1}}}")

_lock = threading.Lock()  # protects the two names below
_own = ""
_agree: Callable[[str], str] = str


def is_run(run: object) -> bool:
    """Whether a text can name a run: up to 64 letters, digits, dots, dashes and underscores, no dot or dash first."""
    return isinstance(run, str) and _RUN.fullmatch(run) is not None


def checked_run(run: object) -> str:
    """Returns the name of a run, which a user gave.

    Raises:
        ValueError: it cannot name a run.
    """
    if not isinstance(run, str) or not is_run(run):
        raise ValueError(f"run is {run!r}, expected {EXPECTED}")
    return run


def own_run() -> str:
    """Returns the name of this program's run: `$HOSTCALLBACK_RUN`, or one that no other run has.

    That one is made of the program, the user, the time of the first call (UTC) and a random number:
    `train-alice-20261122T201500-3fa9c1`. It is the same for the rest of the process, in forked children, and, once
    `jax.distributed` is initialized, in all processes of the program.

    Raises:
        ValueError: the variable cannot name a run.
    """
    global _own
    named = environment.RUN.read()
    if named:
        return checked_run(named)
    with _lock:
        _own = _own or _made()
        return _agree(_own)


def agree_by(agree: Callable[[str], str]) -> None:
    """Sets the function that returns the common name of a program's processes, given the name of this one."""
    global _agree
    _agree = agree


def _made() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0] or "python").stem
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = "user"
    parts = _part(program, 24, "program"), _part(user, 12, "user")
    return f"{'-'.join(parts)}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"


def _part(text: str, chars: int, otherwise: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("_.")[:chars] or otherwise
