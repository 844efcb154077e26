"""Keeps receivers from holding the interpreter lock for long while other threads want it.

A thread that dispatches programs gives the lock up in every call. Without further ado a busy receiver would take it
each time and keep it for Python's switch interval, 5 ms. So while a receiver delivers, the interval is short: whoever
waits gets the lock soon. And a receiver that had to give it up stays away from it for longer than it had it. A receiver
that nobody contends with never rests.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from receiver import native_library as native

SLICE_SEC = 100e-6
"""For how long a receiver keeps the lock while others wait; and how often it looks whether others waited."""

REST_SHARE = 5
"""How many times as long as it had the lock it stays away from it, if others waited."""

MAX_REST_NS = 1_000_000

_lock = threading.Lock()  # protects both
_delivering = 0
_interval = 0.0


class LockShare:
    """Keeps a receiver's share of the interpreter lock small where others want it, in the `with` around each batch."""

    def __init__(self) -> None:
        """Without the native library it never rests: nothing else tells whether a thread waited."""
        self._used: Callable[[], int] = lambda: 0
        self._rest: Callable[[int], None] = lambda ns: None
        if native.available():
            self._used = native.load_holding_lock().hcb_used_while_others_waited
            self._rest = native.load().hcb_rest

    def __enter__(self) -> None:
        """Something is about to be delivered."""
        global _delivering, _interval
        with _lock:
            if not _delivering:
                _interval = sys.getswitchinterval()
                if _interval > SLICE_SEC:
                    sys.setswitchinterval(SLICE_SEC)
            _delivering += 1
        self._used()

    def look(self) -> None:
        """Rests if this thread had to wait for the lock since the last look. To be called every `SLICE_SEC`."""
        used = self._used()
        if used:
            self._rest(min(REST_SHARE * used, MAX_REST_NS))
            self._used()

    def __exit__(self, *error: object) -> None:
        """It has been delivered."""
        global _delivering
        with _lock:
            _delivering -= 1
            # Not if the user has set another one meanwhile.
            changed = abs(sys.getswitchinterval() - SLICE_SEC) > 0.01 * SLICE_SEC
            if not _delivering and _interval > SLICE_SEC and not changed:
                sys.setswitchinterval(_interval)


def after_fork_in_child() -> None:
    """The parent's receivers deliver nothing here."""
    global _lock, _delivering
    _lock = threading.Lock()
    if _delivering and _interval:
        sys.setswitchinterval(_interval)
    _delivering = 0
