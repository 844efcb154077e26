"""Counters of each tap on one device while a client reads them: messages, bytes, failures, time in its function."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hostcallback.receiver.messages import Consumer, Message, Sink


@dataclass(slots=True)
class TapCounts:
    """Counts of one tap on one device since counting began.

    Attributes:
        messages: messages that its function was called with, alone or in stacks.
        nbytes: bytes of their arrays.
        failed: invocations that raised; for a check, its failures.
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
        self._sink = sink  # the sink in another scope

    def fold(self, count: int) -> None:
        with self._lock:
            self.counts.messages += count
            self.counts.failed += count

    def copy(self) -> TapCounts:
        with self._lock:
            return dataclasses.replace(self.counts)


class TapCounters:
    """The counters of all taps of one device. The receiver thread calls `link`; any thread may call the rest."""

    def __init__(self) -> None:
        """Starts without counters."""
        self._counters: dict[int, _Counter] = {}

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """Returns a sink that counts and calls `sink`, the rest of the consumer's chain."""
        counter = self._counters.get(consumer.consumer_id)
        if counter is None or counter.consumer is not consumer:
            counter = self._counters[consumer.consumer_id] = _Counter(consumer, sink)
        else:
            counter.follow(sink)
        return counter

    def count_folded(self, consumer_id: int, count: int) -> None:
        """Adds failures of a check that were folded into its last message."""
        self._counters[consumer_id].fold(count)

    def snapshot(self) -> list[tuple[Consumer, TapCounts]]:
        """Returns each tap's consumer with a copy of its counts."""
        # A copy of the table: the receiver thread adds to it meanwhile.
        return [(counter.consumer, counter.copy()) for counter in list(self._counters.values())]
