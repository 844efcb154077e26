"""Counters of each tap on one device, kept while a client looks: messages, bytes, failures, time in its function."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hostcallback.receiver.messages.message import Consumer, Message, Sink


@dataclass(slots=True)
class TapCounts:
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
    def __init__(self, consumer: Consumer, sink: Sink) -> None:
        self.consumer = consumer
        self.counts = TapCounts()
        self._sink = sink
        self._lock = threading.Lock()  # protects the counts: calls run on several threads

    def __call__(self, message: Message) -> Any:
        started = perf_counter()
        failed = 1
        try:
            result = self._sink(message)
            failed = 0
            return result
        finally:
            seconds = perf_counter() - started
            with self._lock:
                self.counts.messages += message.stacked or 1
                self.counts.nbytes += sum(array.nbytes for array in message.arrays)
                self.counts.failed += failed
                self.counts.tap_sec += seconds

    def follow(self, sink: Sink) -> None:
        self._sink = sink  # of another scope

    def fold(self, count: int) -> None:
        with self._lock:
            self.counts.messages += count
            self.counts.failed += count

    def copy(self) -> TapCounts:
        with self._lock:
            return dataclasses.replace(self.counts)


class TapCounters:
    """Counts for each tap of one device. `link` is called on the receiver thread, the rest on any."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self._counters: dict[int, _Counter] = {}

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """A counter before the sink of the consumer's messages."""
        counter = self._counters.get(consumer.consumer_id)
        if counter is None or counter.consumer is not consumer:
            counter = self._counters[consumer.consumer_id] = _Counter(consumer, sink)
        else:
            counter.follow(sink)
        return counter

    def count_folded(self, consumer_id: int, count: int) -> None:
        """Failures of a check that were left out before its last message."""
        self._counters[consumer_id].fold(count)

    def snapshot(self) -> list[tuple[Consumer, TapCounts]]:
        """Each tap's consumer with a copy of its counts."""
        return [(counter.consumer, counter.copy()) for counter in list(self._counters.values())]
