"""Logs the exceptions of a collector's consumers, at a rate that cannot fill the disk."""

from __future__ import annotations

from collections import Counter

from hostcallback.receiver import limits
from hostcallback.receiver.errors import TapFailure, TapFunctionException
from hostcallback.receiver.log import logger

_Kind = tuple[str, str, str, str]
"""Exception type, tap, source line and device."""


_OTHERS: _Kind = "errors", "others", "other places", "others"
"""What further kinds count as: their names come from outside."""


class RateLimitedErrorLog:
    """Logs the first exception of each kind, then the tenth, the hundredth, ..., and finally the total. One thread."""

    def __init__(self) -> None:
        """No exception has been raised yet."""
        self._counts: Counter[_Kind] = Counter()
        self._said: Counter[_Kind] = Counter()

    def log(self, report: TapFunctionException) -> None:
        """Logs the exceptions that were raised since the last call."""
        reported = {id(failure.exception) for failure in report.failures}
        for failure in report.failures:
            kind = _kind(failure)
            if kind not in self._counts and len(self._counts) >= limits.COUNTED_NAMES:
                kind = _OTHERS
            self._counts[kind] += 1
            count = self._counts[kind]
            if count >= 10 * self._said[kind]:
                self._said[kind] = count
                often = f"; {count} times by now" if count > 1 else ""
                logger.error("%s%s", _line(failure.exception), often)
        # Errors that no consumer caused are not repeated, so each is logged.
        for error in report.exceptions:
            if not {id(error), id(error.__cause__)} & reported:
                logger.error("%s", _line(error))
        if report.suppressed:
            logger.error("%d more exceptions of consumers are not shown", sum(report.suppressed.values()))

    def end(self) -> None:
        """Logs the total of each kind that was raised again since it was last logged."""
        for kind, count in self._counts.items():
            if count > self._said[kind]:
                logger.error("%s was raised by tap %s at %s, device %s: %d times in all", *kind, count)


def _kind(failure: TapFailure) -> _Kind:
    return type(failure.exception).__name__, failure.tap, failure.source_line, failure.device


def _line(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
