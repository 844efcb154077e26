"""Logs what a collector's consumers raise, in a way that one which always raises fills no disk."""

from __future__ import annotations

from collections import Counter

from receiver.errors import TapFailure, TapFunctionException
from receiver.log import logger

_Kind = tuple[str, str, str, str]
"""The exception's type, tap, line and device."""


class RateLimitedErrorLog:
    """Says the first of each kind, then the tenth, the hundredth, ..., and at last how many there were. One thread."""

    def __init__(self) -> None:
        """Nothing has been raised."""
        self._counts: Counter[_Kind] = Counter()
        self._said: Counter[_Kind] = Counter()

    def log(self, report: TapFunctionException) -> None:
        """Logs what was raised since the last time."""
        for failure, error in zip(report.failures, report.exceptions, strict=False):
            kind = _kind(failure)
            self._counts[kind] += 1
            count = self._counts[kind]
            if count >= 10 * self._said[kind]:
                self._said[kind] = count
                often = f"; {count} times by now" if count > 1 else ""
                logger.error("%s%s", _line(error), often)
        for error in report.exceptions[
            len(report.failures) :
        ]:  # what was no consumer's fault is counted there
            logger.error("%s", _line(error))
        if report.suppressed:
            logger.error("%d more exceptions of consumers are not looked at", sum(report.suppressed.values()))

    def end(self) -> None:
        """Logs how often each kind came that has come since it was last said."""
        for kind, count in self._counts.items():
            if count > self._said[kind]:
                logger.error("%s was raised by tap %s at %s, device %s: %d times in all", *kind, count)


def _kind(failure: TapFailure) -> _Kind:
    return type(failure.exception).__name__, failure.tap, failure.source_line, failure.device


def _line(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
