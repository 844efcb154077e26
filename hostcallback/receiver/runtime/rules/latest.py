"""The latest message that a rate left out. Reference of `receiver/native/handlers/latest.cc`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import processes

LATEST_BYTES = 64 << 10
"""Larger messages are not kept."""

RETRY_SEC = 0.01
"""Seconds until a message is tried again whose queue has no room."""


class Queue(Protocol):
    """Where messages go; see `QueueSource`."""

    def has_room(self) -> bool:
        """Whether the queue takes a message without waiting."""

    def append(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], time_ns: int) -> None:
        """Appends a message, without waiting for room."""


class Kept(NamedTuple):
    """One message, with copies of its arrays."""

    queue: Queue
    prefix: bytes
    arrays: Sequence[np.ndarray[Any, Any]]
    time_ns: int

    def send(self) -> None:
        """Puts the message into its queue."""
        self.queue.append(self.prefix, self.arrays, self.time_ns)


class Timer:
    """A daemon thread that calls functions at their times. Each returns the seconds until its next call, or None."""

    def __init__(self) -> None:
        """The thread starts with the first call of `at`."""
        self._changed = threading.Condition()  # protects everything below
        self._due: dict[Callable[[], float | None], float] = {}
        self._thread: threading.Thread | None = None

    def at(self, delay_sec: float, function: Callable[[], float | None]) -> None:
        """Has a function called after `delay_sec`, or earlier if it is due earlier."""
        due = time.monotonic() + delay_sec
        with self._changed:
            if self._due.get(function, float("inf")) <= due:
                return
            self._due[function] = due
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hostcallback-latest", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [function for function, at in self._due.items() if at <= now]
                if not due:
                    first = min(self._due.values(), default=None)
                    # A lock waits for at most some centuries.
                    self._changed.wait(None if first is None else min(first - now, 3600.0))
                    continue
                for function in due:
                    del self._due[function]
            # Without the lock: the functions take locks of admissions, whose holders call `at`.
            for function in due:
                delay_sec = function()
                if delay_sec is not None:
                    self.at(delay_sec, function)


timer = Timer()
"""The timer of this process."""

processes.in_child(processes.Stage.RUNTIME, timer.__init__)  # type: ignore[misc]
