"""Steps whose verdict is not in yet: the barrier asks them to report before it waits for messages."""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()  # protects _settlers
_settlers: dict[Callable[[float | None], None], None] = {}


def add(settle: Callable[[float | None], None]) -> None:
    """Has `settle_all` call `settle(deadline)`, once. Any thread."""
    # Before the lock, since a step adds itself each time it runs.
    if settle not in _settlers:
        with _lock:
            _settlers[settle] = None


def settle_all(deadline: float | None) -> None:
    """Calls what was added since the last time, with the `perf_counter()` value at which to give up.

    Raises:
        TapTimeoutError: the deadline passed. What was not settled is called again the next time.
    """
    while _settlers:
        with _lock:
            settle = next(iter(_settlers), None)
            if settle is None:
                return
            del _settlers[settle]
        # Without the lock: settling waits for devices, and may add steps.
        try:
            settle(deadline)
        except BaseException:
            add(settle)
            raise
