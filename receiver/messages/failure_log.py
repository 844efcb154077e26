"""Logs the failures of taps as they happen: the first one of each tap at once, then a count per minute."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import NamedTuple

from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.log import logger

EVERY_SEC = 60.0
"""How often, at most, further failures of one tap are logged, in seconds."""

MOST_TAPS = 1024
"""Taps whose failures are told apart; failures of further taps are logged like those of one."""


MOST_CHARACTERS = 500
"""Of the text of an exception."""


def cause_of(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's `__str__`
        text = "(its text could not be made)"
    if len(text) > MOST_CHARACTERS:
        text = text[:MOST_CHARACTERS] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LOGGED = "_hostcallback_logged"


def note_logged(error: BaseException) -> None:
    """Has `FailureLog` leave the exception out, because its sink has logged it."""
    with contextlib.suppress(AttributeError):  # of a class with slots: it is logged twice
        setattr(error, _LOGGED, True)


class _Seen(NamedTuple):
    total: int
    logged: int
    at: float


class FailureLog:
    """Logs the failures of one scope. Any thread."""

    def __init__(self) -> None:
        """Nothing has failed."""
        self._lock = threading.Lock()  # protects the table
        self._seen: dict[str, _Seen] = {}

    def add(self, failure: TapFailure) -> None:
        """Logs a failure with the tap, its source line and the cause, or counts it for a later line."""
        if hasattr(failure.exception, _LOGGED):
            return
        key, now = f"{failure.tap} at {failure.source_line}", time.monotonic()
        with self._lock:
            if key not in self._seen and len(self._seen) >= MOST_TAPS:
                key = "a further tap"
            seen = self._seen.get(key)
            total = 1 if seen is None else seen.total + 1
            if seen is not None and now < seen.at + EVERY_SEC:
                self._seen[key] = seen._replace(total=total)
                return
            self._seen[key] = _Seen(total, total, now)
        cause = cause_of(failure.exception)
        if seen is None:
            logger.error("tap %s raised on %s: %s", key, failure.device, cause)
        else:
            logger.error(
                "tap %s raised %d more times, %d in all, the last on %s: %s",
                key, total - seen.logged, total, failure.device, cause,
            )  # fmt: skip
