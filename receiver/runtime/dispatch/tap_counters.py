"""Figures of each tap on one device, counted while somebody looks: messages, bytes, failures, time in its function."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from receiver.messages.message import Consumer, Message


@dataclass(slots=True)
class TapFigures:
    """What one tap did on one device since counting began.

    Attributes:
        messages: that its function was called with, or that were in the stacks it was called with.
        nbytes: of their arrays.
        failed: those of its calls that raised; of a check its failures.
        tap_sec: seconds in its function.
    """

    messages: int = 0
    nbytes: int = 0
    failed: int = 0
    tap_sec: float = 0.0


class _Counter:
    # Stands before a consumer's sink. The sink is looked up each time: rules may put another one there meanwhile.

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.figures = TapFigures()
        self.stand_in = dataclasses.replace(consumer, sink=self)
        self._lock = threading.Lock()  # protects the figures: calls run on several threads

    def __call__(self, message: Message) -> Any:
        started = perf_counter()
        failed = 1
        try:
            result = self.consumer.sink(message)
            failed = 0
            return result
        finally:
            seconds = perf_counter() - started
            with self._lock:
                self.figures.messages += message.stacked or 1
                self.figures.nbytes += sum(array.nbytes for array in message.arrays)
                self.figures.failed += failed
                self.figures.tap_sec += seconds

    def fold(self, count: int) -> None:
        with self._lock:
            self.figures.messages += count
            self.figures.failed += count

    def copy(self) -> TapFigures:
        with self._lock:
            return dataclasses.replace(self.figures)


class TapCounters:
    """Counts for each tap of one device. `find` is called on the receiver thread, the rest on any."""

    def __init__(self, find: Callable[[int], Consumer | None]) -> None:
        """`find` finds consumers by id."""
        self._find = find
        self._counters: dict[int, _Counter] = {}

    def find(self, consumer_id: int) -> Consumer | None:
        """The consumer of that id, with a counter before its sink; or None."""
        consumer = self._find(consumer_id)
        if consumer is None:
            return None
        counter = self._counters.get(consumer_id)
        if counter is None or counter.consumer is not consumer:
            counter = self._counters[consumer_id] = _Counter(consumer)
        return counter.stand_in

    def count_folded(self, consumer_id: int, count: int) -> None:
        """Failures of a check that were left out before its last message."""
        self._counters[consumer_id].fold(count)

    def figures(self) -> list[tuple[Consumer, TapFigures]]:
        """A snapshot."""
        return [(counter.consumer, counter.copy()) for counter in list(self._counters.values())]
