"""Maps messages to OpenTelemetry: failures and texts become events, numbers become points of metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hostcallback.receiver.failures import call_site, deferred_errors, explanation
from hostcallback.receiver.messages import Consumer, Message, array_names, device_text, step_place
from hostcallback.receiver.sinks.factory import own_sink, texts_of
from hostcallback.receiver.taplog.render import joined, plain_array
from hostcallback.receiver.taplog.writing.recorder import description_of, unstacked
from hostcallback.receiver.wire import pytree as tree

Attributes = dict[str, str | int | float | bool]

_OF_REPLAY = re.compile(r"process (?P<process>\d+)(?: of (?P<run>\S+))?(?: \(start \d+\))?, (?P<device>.*)")
_OF_COLLECTOR = re.compile(r"(?P<run>\S+) p(?P<process>\d+) (?P<device>.*)")
"""Device names in messages of several processes."""

_SEVERITIES = ((50, "FATAL", 21), (40, "ERROR", 17), (30, "WARN", 13), (20, "INFO", 9), (0, "DEBUG", 5))
"""Lowest level of `logging`, and OpenTelemetry's text and number for it."""

_ERROR, _INFO = 40, 20


@dataclass(slots=True)
class Event:
    """A log record.

    Attributes:
        time_ns: Unix time of the emission in nanoseconds.
        severity: OpenTelemetry's severity number.
        severity_text: its name.
        body: one line, or the lines of a printed text.
        attributes: under OpenTelemetry's names where it defines one.
    """

    time_ns: int
    severity: int
    severity_text: str
    body: str
    attributes: Attributes = field(default_factory=dict)


class Point(NamedTuple):
    """A value of a gauge.

    Attributes:
        metric: name of the gauge.
        time_ns: Unix time of the emission in nanoseconds.
        value: the number.
        attributes: tap, device, process, step and leaf.
    """

    metric: str
    time_ns: int
    value: int | float
    attributes: Attributes


class MessageMapper:
    """Maps the messages of one tap to events and points.

    Attributes:
        consumer: the tap's consumer.
        is_check: whether the messages are failures of a check.
    """

    def __init__(self, consumer: Consumer, arrays: int) -> None:
        """`consumer` receives messages of `arrays` arrays."""
        self.consumer = consumer
        self._described = described = description_of(consumer, arrays)
        self._kind = kind = described.tap_kind
        self.is_check = kind.is_check
        self._count = arrays
        self._step = step_place(described)
        self._place = call_site.location_of(described.source_line)
        self._unflatten = tree.unflatten_with(described.tree)
        try:
            self._names = array_names(kind, self._unflatten, arrays)
        except (ValueError, TypeError):
            # The descriptor does not fit the arrays: export them under their indices.
            self._names = [str(index) for index in range(arrays)]
        self._metrics = [metric_name(joined(described.name, name)) for name in self._names]
        self._make = self._maker()

    def takes(self, message: Message) -> bool:
        """Whether a message has as many arrays as the mapper was made for."""
        return len(message.arrays) == self._count

    def shortened(self, message: Message) -> Message | None:
        """Returns the message with only the arrays that are exported; None if none is. Receiver threads."""
        if self._make is not None:
            return message
        if not self._kind.has_metrics:
            return None
        # Copies: a tap function may change the arrays before the exporter's thread reads them.
        arrays = [_NOTHING if _left_out(message, array) else array.copy() for array in message.arrays]
        if all(array is _NOTHING for array in arrays):
            return None
        return message._replace(arrays=arrays)

    def left_out(self, message: Message) -> dict[str, int]:
        """Counts the values of a message that are not exported, by reason. Receiver threads."""
        messages = message.stacked or 1
        if self._make is not None:
            return {}
        if not self._kind.has_metrics:
            return {"its tap sends no metrics": messages}
        found: dict[str, int] = {}
        for array in message.arrays:
            reason = _left_out(message, array)
            if reason:
                found[reason] = found.get(reason, 0) + messages
        return found

    def made_of(self, message: Message) -> Iterator[Event | Point]:
        """Yields the events or points of a message. Raises the exceptions of the tap's own code, such as formatting."""
        for arrays in unstacked(message):
            one = message._replace(arrays=arrays, stacked=0)
            if self._make is not None:
                yield from self._make(one)
            else:
                yield from self._points(one)

    def _maker(self) -> Callable[[Message], Iterator[Event]] | None:
        if self.is_check:
            return self._failures
        return self._texts if self._kind.prints else None

    def _failures(self, message: Message) -> Iterator[Event]:
        sink = own_sink(self._described)
        if sink is None:
            yield self._event(message, _ERROR, "a check failed")
            return
        try:
            sink(message)
        except explanation.CheckFailed as failed:
            yield self._failure(message, failed.sink.explain(message))
        except deferred_errors.MultipleFailures as failures:
            for found in failures.exceptions:
                error = found.error if isinstance(found, deferred_errors.DelegatedFailure) else found
                if isinstance(error, explanation.CheckFailed):
                    yield self._failure(message, error.sink.explain(error.message))

    def _failure(self, message: Message, explained: explanation.Explanation) -> Event:
        text = explained.text or "a check failed"
        event = self._event(message, _ERROR, text.splitlines()[0])
        attributes = event.attributes
        attributes["exception.type"] = "CheckError" if explained.error is None else explained.error.__name__
        attributes["exception.message"] = f"{text} ({explained.where})" if explained.where else text
        stack = explained.places[0].stack if explained.places else ()
        if stack:
            attributes |= _code(stack[0].file, stack[0].line, stack[0].function)
            attributes["code.stacktrace"] = "\n".join(map(str, stack))
        for name, value in explained.values.items():
            attributes[f"hostcallback.value.{name}"] = value
        return event

    def _texts(self, message: Message) -> Iterator[Event]:
        level = self._described.params.get("level", _INFO)
        for text in texts_of(self._described, message) or ():
            yield self._event(message, level if isinstance(level, int) else _INFO, text)

    def _points(self, message: Message) -> Iterator[Point]:
        about = self._about(message)
        step = None if self._step is None else self._step.array_in(message.arrays)
        for name, metric, array in zip(self._names, self._metrics, message.arrays, strict=True):
            if array is _NOTHING or array is step:
                continue
            value = plain_array(array).item()
            if isinstance(value, bool):
                value = int(value)
            if isinstance(value, int | float):
                leaf: Attributes = {"hostcallback.leaf": name} if name else {}
                yield Point(metric, message.time_ns, value, about | leaf)

    def _event(self, message: Message, level: int, body: str) -> Event:
        text, number = next((text, number) for least, text, number in _SEVERITIES if level >= least)
        about = self._about(message) | _code(*self._place)
        about["hostcallback.seq"] = message.seq
        if message.run_id:
            about["hostcallback.run_id"] = str(message.run_id)
        return Event(message.time_ns, number, text, body, about)

    def _about(self, message: Message) -> Attributes:
        device = device_text(message.device)
        about: Attributes = {"hostcallback.tap": self.consumer.name, "hostcallback.device": device}
        found = _OF_REPLAY.fullmatch(device) or _OF_COLLECTOR.fullmatch(device)
        if found is not None:
            named = found.groupdict()
            about |= {"hostcallback.process": int(named["process"]), "hostcallback.device": named["device"]}
            if named["run"] is not None:
                about["hostcallback.run"] = named["run"]
        step = None if self._step is None else self._step.read(message.arrays)
        if step is not None:
            about["hostcallback.step"] = step
        return about


_NOTHING: Any = None
"""Placeholder for an array that is not exported."""


def _left_out(message: Message, array: Any) -> str:
    # Why a value of a message is not exported; empty if it is.
    if array.ndim != (1 if message.stacked else 0):
        return "an array"
    return "a complex number" if array.dtype.kind == "c" else ""


def metric_name(name: str) -> str:
    """Converts a name to OpenTelemetry's rules: starts with a letter, then letters, digits and `_.-/`; at most 255."""
    name = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)
    return (name if name[:1].isalpha() else f"tap.{name}")[:255]


def _code(file: str, line: int, function: str) -> Attributes:
    # https://opentelemetry.io/docs/specs/semconv/code/
    found: Attributes = {"code.file.path": file, "code.line.number": line, "code.function.name": function}
    return {key: value for key, value in found.items() if value}
