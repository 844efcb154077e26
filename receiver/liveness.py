"""Checks whether another process is alive."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LOOK_SEC = 1.0
"""Seconds without a message after which the reader process checks that its parent is alive."""


def stays_alive(pid: int) -> bool:
    """Whether a process that has closed its end of a connection lives on for a second.

    A dying process closes its connections a moment before it is gone.
    """
    deadline = time.monotonic() + LOOK_SEC
    while is_alive(pid):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


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
