"""Prints messages, each after its origin, `[p3 d1 step 120 model.py:42]`, and exceptions of consumers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable

from hostcallback.receiver import errors, limits
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks import factory, printing
from hostcallback.receiver.taplog.render import short_text, text_of
from hostcallback.receiver.text import printable, printable_lines
from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

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

    def log(self, report: errors.TapFunctionException) -> None:
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


def _kind(failure: errors.TapFailure) -> _Kind:
    return type(failure.exception).__name__, failure.tap, failure.source_line, failure.device


def _line(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


INDENT = "  "
"""What the lines of a text of several lines begin with, so that none can pass for a line with an origin."""


class StreamPrinter:
    """Prints the messages of one stream with their origin. One thread."""

    def __init__(
        self,
        process: Callable[[], str],
        local_device: Callable[[str], int | None],
        step_of: Callable[[Message], int | None],
        *,
        everything: bool,
    ) -> None:
        """Prints the messages of printing taps, or all with `everything`.

        Args:
            process: returns the label of the process, such as `p3`.
            local_device: returns the index of a device among its process's own, by name.
            step_of: returns the step of a message that is delivered; None if it is not known.
            everything: whether messages of other taps are shown too.
        """
        self._process = process
        self._local_device = local_device
        self._everything = everything
        self._step_of = step_of
        self._described: dict[int, TapDescriptor] = {}

    def __call__(self, message: Message) -> None:
        """Prints a message."""
        consumer = message.consumer
        described = self._described.get(consumer.consumer_id)
        if described is None:
            if consumer.describe is None:
                return
            described = self._described[consumer.consumer_id] = consumer.describe()
        kind = described.tap_kind
        if not kind.prints and (kind.is_check or not self._everything):
            return
        text = self._text(described, message)
        between = f"\n{INDENT}" if "\n" in text else " "
        printing.write_at_once(
            sys.stdout, f"{self._start(described, message)}{between}{printable_lines(text, INDENT)}\n"
        )

    def _start(self, described: TapDescriptor, message: Message) -> str:
        device, step = str(message.device).rpartition(" ")[2], self._step_of(message)
        local = self._local_device(device)
        number = device.rpartition(":")[2] if local is None else str(local)
        at_step = "" if step is None else f" step {step}"
        line = os.path.basename(described.source_line.split(" ", 1)[0])
        return printable(f"[{self._process()} d{number}{at_step} {line}]")

    def _text(self, described: TapDescriptor, message: Message) -> str:
        text = text_of(described, message)
        if text is not None:
            return text
        texts = factory.texts_of(described, message) if described.tap_kind.prints else None
        if texts is not None:
            return "\n".join(texts)
        value = tree.unflatten_with(described.tree)(message.arrays)
        return f"{printable(described.name)} {short_text(value, 160)}"
