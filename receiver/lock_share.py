"""Keeps receivers from holding the interpreter lock for long while other threads want it.

A thread that dispatches programs gives the lock up in every call. Without further ado a busy receiver would take it
each time and keep it for Python's switch interval, 5 ms. So while a receiver delivers, the interval is short: whoever
waits gets the lock soon. And from time to time the receiver pauses without the lock. If it then has to wait for it,
others want it: it pauses for longer than it works, for as long as that is so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import perf_counter, perf_counter_ns

from receiver import native_library as native

INTERVAL_SEC = 97e-6
"""The switch interval while receivers deliver. An odd number, so that one that somebody else sets is told from it."""

WORK_SEC = 100e-6
"""For how long a receiver works between two pauses if others want the lock."""

ALONE_SEC = 1e-3
"""The same if nobody does."""

PAUSE_NS = round(1e9 * 5 * WORK_SEC)
"""How long it pauses if others want the lock."""

LOOK_NS = 50_000
"""How long it pauses to see whether somebody does: as long as a thread takes to wake up."""

LATE_NS = 10_000
"""To have the lock back later than this after a pause is to have waited for it."""

ALONE_AFTER = 5
"""After so many pauses without having to wait, nobody wants the lock any more."""

_lock = threading.Lock()  # protects what follows
_delivering = 0
_users_interval = 0.0


def _is_ours(interval: float) -> bool:
    return abs(interval - INTERVAL_SEC) < 1.5e-6  # it is kept in whole microseconds


class LockShare:
    """Keeps a receiver's share of the interpreter lock small where others want it, in the `with` around each batch."""

    def __init__(self) -> None:
        """Without the native library it never pauses: from Python the end of a sleep is seen with the lock only."""
        self._sleep: Callable[[int], int] | None = None
        if native.available():
            self._sleep = native.load().hcb_sleep
        self._contended = 0  # how many pauses more are to be long
        self._worked = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        """Something is about to be delivered."""
        global _delivering, _users_interval
        with _lock:
            interval = sys.getswitchinterval()
            if not _is_ours(interval):  # else somebody has restored what we had set
                _users_interval = interval
            if interval > INTERVAL_SEC:
                sys.setswitchinterval(INTERVAL_SEC)
            _delivering += 1
        self._began = perf_counter()

    def due(self) -> float:
        """The `perf_counter()` value at which `pause` is due."""
        return self._began + (WORK_SEC if self._contended else ALONE_SEC) - self._worked

    def pause(self) -> float:
        """Lets others have the lock. Returns for how many seconds."""
        begin = perf_counter()
        if self._sleep is not None:
            woke = self._sleep(PAUSE_NS if self._contended else LOOK_NS)
            waited = perf_counter_ns() - woke > LATE_NS
            self._contended = ALONE_AFTER if waited else max(0, self._contended - 1)
        self._worked = 0.0
        self._began = perf_counter()
        return self._began - begin

    def __exit__(self, *error: object) -> None:
        """It has been delivered."""
        global _delivering
        self._worked += perf_counter() - self._began
        with _lock:
            _delivering -= 1
            if not _delivering and _users_interval > INTERVAL_SEC and _is_ours(sys.getswitchinterval()):
                sys.setswitchinterval(_users_interval)


def after_fork_in_child() -> None:
    """The parent's receivers deliver nothing here."""
    global _lock, _delivering
    _lock = threading.Lock()
    _delivering = 0
    if _users_interval and _is_ours(sys.getswitchinterval()):
        sys.setswitchinterval(_users_interval)
