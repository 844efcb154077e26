"""Whether another process is there still."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LOOK_SEC = 1.0
"""How often the reader process looks whether its parent is there still, if no message says so."""


def stays_alive(pid: int) -> bool:
    """Whether a process that has closed its end of a connection goes on; one that dies does that a moment before."""
    deadline = time.monotonic() + LOOK_SEC
    while is_alive(pid):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


def is_alive(pid: int) -> bool:
    """Whether there is a process of that number, other than one that is dead and that nobody has asked after."""
    try:
        os.kill(pid, 0)
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] not in "ZX"
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
