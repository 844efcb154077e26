"""How long the end of a process waits for its taps: as long as any message is delivered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime

TELL_SEC = 3.0
"""Seconds of waiting after which one line says how many messages are left."""


class ExitWait:
    """Looks on while a process waits for its taps at its end. One thread.

    Attributes:
        idle_sec: seconds without a delivery after which the wait ends.
    """

    def __init__(self, idle_sec: float) -> None:
        """Begins now."""
        self.idle_sec = idle_sec
        self._begun = self._since = perf_counter()
        self._seen = _progress()
        self._told = False

    def look(self) -> None:
        """Goes on while anything is delivered on any device. Prints one line after `TELL_SEC`.

        Raises:
            TapTimeoutError: nothing was delivered for `idle_sec`.
        """
        now, seen = perf_counter(), _progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self.idle_sec:
            raise TapTimeoutError(runtime.describe_wait() or describe_backlog() or _NO_END)
        if not self._told and now - self._begun > TELL_SEC:
            self._told = True
            waits_for = describe_backlog() or "computations that still run"
            with suppress(OSError, ValueError):  # the standard error output is closed
                print(
                    f"hostcallback: the program has ended and waits for {waits_for}; Ctrl-C ends it without them",
                    file=sys.stderr,
                    flush=True,
                )


def describe_backlog() -> str:
    """Says how many messages wait for which function, and how many records for which metric writer; may be empty."""
    return "; ".join(filter(None, [runtime.describe_backlog(), *_records()]))


def flush_writers(look: Callable[[], None]) -> None:
    """Has the metric writers of open receivers write what they have, and logs what those that are blocked lose.

    Args:
        look: called repeatedly while waiting; may raise to stop the wait.
    """
    for scope in runtime.current_scopes():
        if scope.metrics is not None:
            scope.metrics.flush(look=look)
    for lost in _records():
        logger.error("%s were lost at exit", lost)


def _progress() -> tuple[Any, ...]:
    return (*runtime.progress(), *_records())


def _records() -> list[str]:
    scopes = [scope for scope in runtime.current_scopes() if scope.metrics is not None]
    return [text for scope in scopes if scope.metrics for text in scope.metrics.backlog()]


_NO_END = (
    "dispatched computations were still running when the time was up: wait for their results before the program ends, "
    "or look for a computation that does not end"
)
