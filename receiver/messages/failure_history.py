"""What has failed in this process, by source line, for those who look at it from outside."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver import fork
from hostcallback.receiver.bounded_counter import BoundedCounter
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.log import traceback_text
from hostcallback.receiver.messages.check_report import CheckFailed, FailedCheck, FailedChecks
from hostcallback.receiver.messages.failure_log import cause_of
from hostcallback.receiver.messages.failure_report import Deferred
from hostcallback.receiver.messages.message import Consumer

MOST_LINES = 64
"""Lines of exceptions, and lines of checks, that are told apart; further ones are left out."""

MOST_CHARACTERS = 4000
"""Of the traceback, and of the values, of one line."""

ALL_CHARACTERS = 64 << 10
"""Of all tracebacks and values in one answer."""

MOST_FRAMES = 20
"""Of a traceback."""


@dataclass(slots=True)
class _Raised:
    # The exceptions of one tap, without the exceptions themselves: their frames hold arrays.
    title: str
    traceback: str
    first: float
    last_text: str = ""
    last: float = 0.0
    by_device: Counter[str] = field(default_factory=BoundedCounter)


class FailureHistory:
    """The exceptions of tap functions and the failed checks since the process began, with limits. Any thread.

    Errors are in it also after a barrier has raised them.
    """

    def __init__(self) -> None:
        """Nothing has failed."""
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._lock = (
            threading.RLock()
        )  # protects everything below; an exception's text may come from user code
        self._raised: dict[tuple[str, str], _Raised] = {}
        self._checks = FailedChecks(MOST_LINES)

    def add_exception(self, failure: TapFailure, count: int = 1) -> None:
        """Counts an exception; the first one of a tap is kept as text with its traceback."""
        key, now = (failure.source_line, failure.tap), time.time()
        known = self._raised.get(key)
        if known is None and len(self._raised) >= MOST_LINES:
            return
        text = cause_of(failure.exception)
        made = None if known is not None else _traceback(failure.exception)
        with self._lock:
            known = self._raised.get(key) or _Raised(text, made or "", now)
            self._raised[key] = known
            known.last, known.last_text = now, text
            known.by_device[failure.device] += count

    def add_check(self, consumer: Consumer, failed: CheckFailed, device: str, count: int) -> None:
        """Counts `count` failures of a check."""
        with self._lock:
            self._checks.add(consumer, failed, device, count)

    def merge(self, found: Deferred) -> None:
        """Adds the failures in another process that delivers for this one."""
        for failure in found.failures:
            self.add_exception(failure)
            more = found.suppressed.get(failure.source_line, 0)
            if more and failure is _last_of(failure.source_line, found):
                self.add_exception(failure, more)
        if found.checks is not None:
            with self._lock:
                earlier, self._checks = self._checks, FailedChecks(MOST_LINES)
                self._checks.merge(found.checks)
                self._checks.merge(earlier)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Describes the failures as plain data, the latest first: of bounded length, and not escaped."""
        with self._lock:
            found = [_raised(*key, each) for key, each in self._raised.items()]
            found += map(_failed, self._checks.groups()[:MOST_LINES])
        found.sort(key=lambda each: -each["last"])
        left = ALL_CHARACTERS
        for each in found:
            for name in ("values", "traceback"):
                each[name] = each[name][: min(MOST_CHARACTERS, max(0, left))]
                left -= len(each[name])
        return found


def _last_of(line: str, found: Deferred) -> TapFailure:
    return [failure for failure in found.failures if failure.source_line == line][-1]


def _raised(source_line: str, tap: str, known: _Raised) -> dict[str, Any]:
    is_other = known.last_text != known.title
    return {
        "kind": "tap exception",
        "name": tap[:300],
        "source_line": source_line[:1000],
        "title": known.title,
        "values": f"the last: {known.last_text}" if is_other else "",
        "traceback": known.traceback,
        "by_device": dict(known.by_device),
        "first": known.first,
        "last": known.last,
    }


def _failed(check: FailedCheck) -> dict[str, Any]:
    explained = check.explanation
    # Watched operations report with an ArithmeticError, checks with an AssertionError.
    is_nonfinite = explained.error is not None and issubclass(explained.error, ArithmeticError)
    stack = explained.places[0].stack if explained.places else ()
    return {
        "kind": "nonfinite" if is_nonfinite else "check",
        "name": check.name[:300],
        "source_line": check.source_line[:1000],
        "title": explained.text[:500],
        "values": explained.summary(),
        "traceback": "\n".join(str(frame).split("\n", 1)[0] for frame in stack[:MOST_FRAMES]),
        "by_device": dict(check.by_device),
        "first": check.first.time_ns / 1e9,
        "last": check.last.time_ns / 1e9,
    }


def _traceback(error: BaseException) -> str:
    try:
        return traceback_text(error, limit=-MOST_FRAMES)[-MOST_CHARACTERS:].rstrip("\n")
    except Exception:  # of a user's `__str__` or `__repr__`
        return ""


failure_history = FailureHistory()
"""Of this process, over all scopes."""

fork.in_child(fork.Stage.RUNTIME, failure_history.clear)
