"""The chain of sinks that a device's messages pass before the sinks of their taps, and the counters of each tap.

A device's chain has up to three kinds of links, from the outside in:

- batch sinks (`BatchSink`: recorders and forwarders) get each batch as the device sent it, before it is delivered;
- the sinks of the scope (`ScopeSinks`) get each message;
- the counters of each tap (`TapCounters`) count the messages, errors and seconds of the tap's sink, while a client
  reads them.

The last link is the sink of the tap's consumer. Rules put their gate (`GateSink`) before it. For a value that is
sharded over several devices the gate stands behind the assembly, because a rule looks at the whole value.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from hostcallback.receiver.messages import Consumer, Find, Message, Sink
from hostcallback.receiver.sources.source import Batch

Link = Callable[[Consumer, Sink], Sink]
"""Returns the sink of one consumer's messages, given the rest of the chain; returns that rest if it adds nothing.
The receiver thread calls it once per consumer."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes a device's messages in batches of frames.

    The methods are called in the device's order, on its receiver thread or on the thread that copies frames during a
    long delivery, never on both at once. They must not raise. A scope hands each batch to its batch sinks before the
    first message of it is delivered.
    """

    def record_batch(
        self,
        device: str,
        batch: Batch,
        find: Find,
        *,
        dropped: int = 0,
        first_seq: int = 0,
        last_seq: int = 0,
    ) -> None:
        """Takes a batch. Its memory is reused after the return.

        Args:
            device: the device's name.
            batch: the frames; an END_OF_STREAM frame is the only one of its batch.
            find: finds the consumer of an id.
            dropped: number of messages of the device that are missing among the frames or before them.
            first_seq: the sequence number that was expected next.
            last_seq: the last sequence number of the batch.
        """

    def lose(self, device: str, count: int, reason: str) -> None:
        """Counts messages of a device that were lost before they could be read."""

    def write(self) -> None:
        """Writes all batches so far, so that they survive the death of this process."""

    def flush(self) -> None:
        """Writes all batches so far. `barrier_wait` calls this on the waiting thread."""


class SinkChain:
    """The links before the consumers' sinks, for one device. Used on its receiver thread.

    Attributes:
        find: finds the consumer of an id, whose sink is the whole chain. Without links it is the registry's function
            and costs nothing more.
    """

    def __init__(self, find: Find, links: Sequence[Link] = ()) -> None:
        """Makes the chain.

        Args:
            find: finds consumers with their taps' sinks.
            links: the links, the innermost first.
        """
        self._find = find
        self._links = tuple(links)
        self._linked: dict[int, tuple[Consumer, Consumer]] = {}
        self.find: Find = self._find_linked if self._links else find

    def _find_linked(self, consumer_id: int) -> Consumer | None:
        consumer = self._find(consumer_id)
        if consumer is None:
            return None
        known = self._linked.get(consumer_id)
        # A consumer may have been registered again under its id, with another sink.
        if known is None or known[0] is not consumer:
            known = self._linked[consumer_id] = consumer, self._link(consumer)
        return known[1]

    def _link(self, consumer: Consumer) -> Consumer:
        def own(message: Message) -> Any:
            return consumer.sink(message)  # looked up for each message, because rules may put a gate there

        sink: Sink = own
        for link in self._links:
            sink = link(consumer, sink)
        return consumer if sink is own else dataclasses.replace(consumer, sink=sink)


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
