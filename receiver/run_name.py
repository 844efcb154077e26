"""The name of this program's run, by which logs, spools and collectors tell runs apart."""

from __future__ import annotations

import getpass
import re
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from hostcallback.receiver import environment

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
