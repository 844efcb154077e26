"""The chain of sinks that a device's messages pass before the sinks of their own taps.

A device's chain has up to three kinds of links, from the outside in:

- batch sinks (`BatchSink`: recorders and forwarders) get each batch as the device sent it, before it is delivered;
- the sinks of the scope (`ScopeSinks`) get each message;
- the counters of each tap (`TapCounters`) count what its own sink does, while a client looks at them.

The last link is the sink of the tap's consumer. Rules put their gate (`GateSink`) before it; of a value that lies on
several devices the gate stands behind the assembly, because a rule looks at the whole value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from hostcallback.receiver.messages.message import Consumer, Message, Sink
from hostcallback.receiver.sources.source import Batch

Find = Callable[[int], Consumer | None]

Link = Callable[[Consumer, Sink], Sink]
"""Makes the sink of one consumer's messages from the rest of the chain; returns that rest if it has nothing to add.
Called on the receiver thread, once for each consumer."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes what a device sent in batches, as frames, and not message by message.

    The methods are called on the receiver thread of the device, in the device's order, and must not raise. The chain
    of a scope hands each batch to its batch sinks before the first message of it is delivered.
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
        """Takes a batch. Its memory is used again when this returns.

        Args:
            device: the device's name.
            batch: the frames; an END_OF_STREAM frame is the only one of its batch.
            find: finds the consumer of an id.
            dropped: how many messages of the device are missing among them, or before them.
            first_seq: the sequence number at which the first of those was to be expected.
            last_seq: the last sequence number of the batch.
        """

    def lose(self, device: str, count: int, reason: str) -> None:
        """Notes that messages of a device were lost before they could be read."""

    def write(self) -> None:
        """Writes all batches so far, so that they outlive this process."""

    def flush(self) -> None:
        """Writes all batches so far; `barrier_wait` calls this on the thread that waits."""


class SinkChain:
    """The links before the sinks of consumers, for one device. On its receiver thread.

    Attributes:
        find: finds the consumer of an id; its sink is the whole chain. It costs nothing more if there are no links.
    """

    def __init__(self, find: Find, links: Sequence[Link] = ()) -> None:
        """Makes the chain.

        Args:
            find: finds consumers with the sinks of their own taps.
            links: the innermost first.
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
        if known is None or known[0] is not consumer:
            known = self._linked[consumer_id] = consumer, self._link(consumer)
        return known[1]

    def _link(self, consumer: Consumer) -> Consumer:
        def own(message: Message) -> Any:
            return consumer.sink(message)  # looked up each time: rules may put a gate there

        sink: Sink = own
        for link in self._links:
            sink = link(consumer, sink)
        return consumer if sink is own else dataclasses.replace(consumer, sink=sink)
