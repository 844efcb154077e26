"""When receivers release the interpreter lock for other threads, and when they allow Ctrl-C.

A thread that dispatches programs releases the lock in every call. A busy receiver would then take it each time and
keep it for Python's switch interval, 5 ms. So while a receiver delivers, the interval is short, and a waiting thread
gets the lock soon. A receiver infers that other threads want the lock if it had to wait often and briefly during a
delivery, or if it gets the lock back late after a pause. From then on it pauses for longer than it works, until a
thread begins to wait for its deliveries: that one mostly was the other.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which take 3 us a call
import ctypes
import sys
import threading
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from types import FrameType
from typing import Any

from hostcallback.receiver import processes
from hostcallback.receiver.native import bindings as native

INTERVAL_SEC = 97e-6
"""Switch interval while receivers deliver. An odd number, to distinguish it from an interval that the user sets."""

WORK_SEC = 100e-6
"""Seconds that a receiver works between two checks, while other threads want the lock."""

ALONE_SEC = 1e-3
"""Seconds that a receiver works between two checks, while no other thread is known to want the lock."""

PAUSE_NS = round(1e9 * 5 * WORK_SEC)
"""Length of a pause in ns if other threads want the lock."""

LOOK_NS = 50_000
"""Length in ns of a pause that checks whether another thread wants the lock: the time in which a thread wakes up."""

LATE_NS = 10_000
"""A receiver that has the lock back later than this after a pause has waited for another thread."""

SHORT_SEC = 80e-6
"""Waits that are shorter than this count as waits for the lock, because a thread that takes it briefly releases it so
soon. Sleeps, and waits for disks and networks, are longer."""

OFTEN = 4
"""This many short waits, in one check or over a few, indicate a thread that keeps wanting the lock. One does not."""

FADES = 1 / 8
"""Part of the counted waits that each check forgets. A wait in which the thread keeps its processor does not count."""

ALONE_AFTER = 20
"""Number of pauses in a row without delay after which no other thread is taken to want the lock. A dispatching thread
holds it half of the time."""

LIGHT_SEC = 5e-6
"""Functions that take less processor time than this for each message, with the rest of the work on it, hold the lock
for most of that time. Functions that take more may release it."""

LIGHT_MESSAGES = 16
"""Number of messages from which on a receiver judges its functions."""

BLOCKED = 4
"""Functions that wait for longer than this times their processor time run better while others deliver."""

WITHOUT_TURN = 50
"""Number of batches without the turn after functions that waited. Then the receiver tries it again."""

_lock = threading.Lock()  # protects `_delivering` and `_users_interval`
_delivering = 0
_users_interval = 0.0


def _is_ours(interval: float) -> bool:
    return abs(interval - INTERVAL_SEC) < 1.5e-6  # Python keeps it in whole microseconds


class GilThrottle:
    """Context manager around each batch that keeps the receiver's share of the interpreter lock small.

    Receivers whose functions return at once (`wants_turn`) deliver one after another: each reads a batch with the turn
    to deliver (`Source.read`), which it gives in pauses and at the end.

    Attributes:
        contended: number of further pauses for which other threads are taken to want the lock.
        messages: number of messages of this delivery so far. The dispatcher sets it.
        in_turn: whether the delivery has begun with the turn. The receiver sets it.
    """

    def __init__(self) -> None:
        """Makes the throttle of one receiver. Without the native library it never pauses."""
        self._library = native.load() if native.available() else None
        self._quick = native.load_holding_lock() if native.available() else None
        self._cpu = ctypes.c_int64()
        self.contended = self.messages = 0
        self.in_turn = False
        self._seen = 0.0  # recent waits for the lock, which fade
        self._forgets = False  # whether the next check leaves out what was seen before it
        # Since the last check, while delivering: seconds, seconds without a processor, and waits.
        self._worked = self._off = 0.0
        self._waits = 0
        # Since the last look at functions, and of earlier looks, which fade: messages, seconds of the processor,
        # seconds of waiting.
        self._looked_at = 0
        self._cpu_sec = self._wait_sec = 0.0
        self._recent = (0.0, 0.0, 0.0)
        self._without_turn = 0  # batches for which it takes no turn any more
        # Values at the last `_begin`, from which `_add_up` counts.
        self._began = self._began_cpu = 0.0
        self._began_waits = 0

    def __enter__(self) -> None:
        """Shortens the switch interval for a delivery."""
        global _delivering, _users_interval
        with _lock:
            interval = sys.getswitchinterval()
            if not _is_ours(interval):  # other code may have read our interval and restored it later
                _users_interval = interval
            if interval > INTERVAL_SEC:
                sys.setswitchinterval(INTERVAL_SEC)
            _delivering += 1
        self._begin()

    def _begin(self) -> None:
        if self._quick is not None:
            # `_quick` keeps the lock: a call that released it would itself cause the waits that are counted
            # here.
            self._began_waits = self._quick.hcb_waits(self._cpu)
            self._began_cpu = self._cpu.value * 1e-9
        self._began = perf_counter()

    def _add_up(self) -> None:
        worked = perf_counter() - self._began
        self._worked += worked
        if self._quick is not None:
            waits = self._quick.hcb_waits(self._cpu) - self._began_waits
            cpu = self._cpu.value * 1e-9 - self._began_cpu
            self._waits += waits
            self._off += worked - cpu
            self._cpu_sec += cpu
            self._wait_sec += worked - cpu if waits else 0.0

    def forget(self) -> None:
        """Makes the next check forget that another thread wanted the lock. Any thread: one that begins to wait."""
        self._forgets = True

    def begin_messages(self) -> None:
        """Begins to look at the functions that get the messages of this delivery."""
        self._add_up()
        self._begin()
        self._cpu_sec = self._wait_sec = 0.0
        self.messages = self._looked_at = 0

    @property
    def wants_turn(self) -> bool:
        """Whether the last functions took little time and did not wait."""
        messages, cpu_sec, _ = self._recent
        return messages >= LIGHT_MESSAGES and cpu_sec < LIGHT_SEC * messages and not self._without_turn

    def _look_at_functions(self) -> None:
        # Without the turn they mostly wait for the lock, so waits count in the turn only.
        new = (self.messages - self._looked_at, self._cpu_sec, self._wait_sec if self.in_turn else 0.0)
        self._looked_at = self.messages
        self._cpu_sec = self._wait_sec = 0.0
        messages, cpu_sec, wait_sec = (
            (1 - FADES) * before + now for before, now in zip(self._recent, new, strict=True)
        )
        if wait_sec > BLOCKED * cpu_sec:
            self._without_turn = WITHOUT_TURN
            wait_sec = 0.0
        self._recent = messages, cpu_sec, wait_sec

    def next_yield_at(self) -> float:
        """The `perf_counter()` value at which `yield_gil` is due."""
        return self._began + (WORK_SEC if self.contended else ALONE_SEC) - self._worked

    def yield_gil(self) -> float:
        """Releases the lock for a pause if other threads may want it. Returns the length of the pause in seconds."""
        begin = perf_counter()
        self._add_up()
        if self._forgets:
            self._forgets = False
            self.contended = self._waits = 0
            self._seen = 0.0
        short = self._waits > 0 and self._off < SHORT_SEC * self._waits
        self._seen = (1 - FADES) * self._seen + short * self._waits
        wanted = short and (self.contended > 0 or self._seen >= OFTEN)
        if self._quick is not None and self.in_turn:
            self._look_at_functions()
            if not self.wants_turn:
                self._quick.hcb_delivery_turn_give()
                self.in_turn = False
        if self._library is not None and (self.contended or self._waits):
            # `_library` releases the lock during the call: that is what lets the other threads have it.
            woke = self._library.hcb_delivery_pause(PAUSE_NS if self.contended or wanted else LOOK_NS)
            wanted = wanted or perf_counter_ns() - woke > LATE_NS
            self.contended = ALONE_AFTER if wanted else max(0, self.contended - 1)
        elif (
            self._library is not None and self._quick is not None and self._quick.hcb_delivery_turn_awaited()
        ):
            self._library.hcb_delivery_pause(0)
        self._worked = self._off = 0.0
        self._waits = 0
        self._begin()
        return self._began - begin

    def __exit__(self, *error: object) -> None:
        """Gives the turn, and restores the user's switch interval after the last running delivery."""
        global _delivering
        self._add_up()
        if self._quick is not None:
            self._quick.hcb_delivery_turn_give()
            self._look_at_functions()
            self._without_turn = max(0, self._without_turn - 1)
        with _lock:
            _delivering -= 1
            # Not if another interval is set now: the user has changed it during the delivery, and that one
            # stays.
            if not _delivering and _users_interval > INTERVAL_SEC and _is_ours(sys.getswitchinterval()):
                sys.setswitchinterval(_users_interval)


def after_fork_in_child() -> None:
    """Resets the state in a forked child, where the parent's receivers do not run."""
    global _lock, _delivering
    _lock = threading.Lock()
    _delivering = 0
    # The parent may have been delivering when it forked, and no receiver of this process would restore the
    # interval.
    if _users_interval and _is_ours(sys.getswitchinterval()):
        sys.setswitchinterval(_users_interval)


processes.in_child(processes.Stage.RUNTIME, after_fork_in_child)


# From `_signal`: the functions of `signal` are slower, since they convert to enums and back, and each call
# uses them several times.
_getsignal, _set, _SIGINT = _signal.getsignal, _signal.signal, _signal.SIGINT
_main_thread = threading.main_thread()

set_handler: Callable[[int, Any], object] = _set
"""Sets a handler of a signal, in place of a native one; `signals` changes this while the native one must stay."""


class HeldInterrupts:
    """Delays SIGINT on the calling thread from construction until `end`.

    Python interrupts only the main thread, so on other threads this does nothing.

    Attributes:
        noted: whether an interrupt came meanwhile. The caller must raise it later.
    """

    __slots__ = ("_handler", "noted")

    def __init__(self) -> None:
        """Delays interrupts from now on."""
        self.noted = False
        self._handler: Any = None  # the handler that was installed before
        # Python runs handlers on its main thread only, and lets no other thread set them.
        if threading.current_thread() is _main_thread:
            handler = _getsignal(_SIGINT)
            if callable(handler):  # otherwise SIGINT runs no Python code
                self._handler = handler
                self._set_note()

    @property
    def are_of_python(self) -> bool:
        """Whether an interrupt raises KeyboardInterrupt, as without a handler of the user's."""
        return self._handler is _signal.default_int_handler

    def hold(self) -> None:
        """Delays interrupts again, after `allow`. Keeps the handler that user code has installed meanwhile."""
        if self._handler is not None:
            current = _getsignal(_SIGINT)
            if current is not self._handler and current != self._note and callable(current):
                self._handler = current
            self._set_note()

    def allow(self) -> None:
        """Lets interrupts pass until `hold`, while user code runs, and the one that has come: it may raise."""
        self.end()
        if self.noted:
            self.noted = False
            self._handler(_SIGINT, sys._getframe())

    def end(self) -> None:
        """Lets interrupts pass again, but not the one that has come."""
        if self._handler is not None:
            set_handler(_SIGINT, self._handler)

    def note(self, error: BaseException) -> None:
        """Sets `noted` if user code raised a KeyboardInterrupt on the main thread."""
        if self._handler is not None and isinstance(error, KeyboardInterrupt):
            self.noted = True

    def _set_note(self) -> None:
        while True:
            try:
                set_handler(_SIGINT, self._note)
                return
            except KeyboardInterrupt:  # `signal` runs the handlers of signals that came before
                self.noted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
