"""Keeps receivers from holding the interpreter lock for long while other threads want it.

A thread that dispatches programs gives the lock up in every call. Without further ado a busy receiver would take it
each time and keep it for Python's switch interval, 5 ms. So while a receiver delivers, the interval is short: whoever
waits gets the lock soon. And a receiver that has had to wait while it delivered, often and shortly, or that gets the
lock back late after a moment without it, knows that others want it: from then on it pauses for longer than it works.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from time import perf_counter, perf_counter_ns

from hostcallback.receiver import fork
from hostcallback.receiver.native import bindings as native

INTERVAL_SEC = 97e-6
"""The switch interval while receivers deliver. An odd number, so that one that somebody else sets is told from it."""

WORK_SEC = 100e-6
"""For how long a receiver works before it looks whether it had to wait, if others want the lock."""

ALONE_SEC = 1e-3
"""The same if nobody is known to."""

PAUSE_NS = round(1e9 * 5 * WORK_SEC)
"""How long it pauses if others want the lock."""

LOOK_NS = 50_000
"""How long it pauses to see whether somebody does: as long as a thread takes to wake up."""

LATE_NS = 10_000
"""To have the lock back later than this after a pause is to have waited for it."""

SHORT_SEC = 80e-6
"""Waits that are shorter than this are for the lock: who takes it for a moment gives it back so soon. Sleeps, and waits
for disks and networks, are longer."""

OFTEN = 4
"""This many of them, at once or over a few looks, mean a thread that goes on wanting the lock. One means nothing."""

FADES = 1 / 8
"""This part of them is forgotten at each look. A wait in which the thread keeps its processor is not counted."""

ALONE_AFTER = 20
"""After so many pauses without being late nobody wants the lock any more: a thread that dispatches has it half of the
time."""

_lock = threading.Lock()  # protects what follows
_delivering = 0
_users_interval = 0.0


def _is_ours(interval: float) -> bool:
    return abs(interval - INTERVAL_SEC) < 1.5e-6  # it is kept in whole microseconds


class GilThrottle:
    """Keeps a receiver's share of the interpreter lock small where others want it, in the `with` around each batch."""

    def __init__(self) -> None:
        """Without the native library it never pauses."""
        self._library = native.load() if native.available() else None
        self._quick = native.load_holding_lock() if native.available() else None
        self._cpu = ctypes.c_int64()
        self._contended = 0  # for how many pauses more others are taken to want the lock
        self._seen = 0.0  # waits for the lock, lately
        # Since the last look, while delivering: seconds, those without a processor, and waits.
        self._worked = self._off = 0.0
        self._waits = 0
        # At the beginning of this stretch of it.
        self._began = self._began_cpu = 0.0
        self._began_waits = 0

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
        self._begin()

    def _begin(self) -> None:
        if self._quick is not None:
            self._began_waits = self._quick.hcb_waits(self._cpu)
            self._began_cpu = self._cpu.value * 1e-9
        self._began = perf_counter()

    def _add_up(self) -> None:
        worked = perf_counter() - self._began
        self._worked += worked
        if self._quick is not None:
            self._waits += self._quick.hcb_waits(self._cpu) - self._began_waits
            self._off += worked - (self._cpu.value * 1e-9 - self._began_cpu)

    def forget(self) -> None:
        """Nobody is known to want the lock from now on. Any thread."""
        self._contended = 0

    def next_yield_at(self) -> float:
        """The `perf_counter()` value at which `yield_gil` is due."""
        return self._began + (WORK_SEC if self._contended else ALONE_SEC) - self._worked

    def yield_gil(self) -> float:
        """Lets others have the lock if they want it. Returns for how many seconds."""
        begin = perf_counter()
        self._add_up()
        short = self._waits > 0 and self._off < SHORT_SEC * self._waits
        self._seen = (1 - FADES) * self._seen + short * self._waits
        wanted = short and (self._contended > 0 or self._seen >= OFTEN)
        if self._library is not None and (self._contended or self._waits):
            woke = self._library.hcb_sleep(PAUSE_NS if self._contended or wanted else LOOK_NS)
            wanted = wanted or perf_counter_ns() - woke > LATE_NS
            self._contended = ALONE_AFTER if wanted else max(0, self._contended - 1)
        self._worked = self._off = 0.0
        self._waits = 0
        self._begin()
        return self._began - begin

    def __exit__(self, *error: object) -> None:
        """It has been delivered."""
        global _delivering
        self._add_up()
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


fork.in_child(fork.Stage.RUNTIME, after_fork_in_child)
