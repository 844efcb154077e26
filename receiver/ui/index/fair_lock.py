"""A lock whose busiest thread lets others in."""

from __future__ import annotations

import threading
import time
from types import TracebackType

PAUSE_SEC = 0.0005


class FairLock:
    """A reentrant lock. A thread that takes it often calls `let_others` between: Python's locks are unfair."""

    def __init__(self) -> None:
        """The lock is free."""
        self._lock = threading.RLock()
        self._waiting: set[int] = set()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.add(threading.get_ident())
            self._lock.acquire()
            self._waiting.discard(threading.get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def let_others(self) -> None:
        """Lets a waiting thread take the lock. Called without holding it."""
        if self._waiting:
            time.sleep(PAUSE_SEC)
