"""The consumers of the parent process, from the descriptors that it writes to a file."""

from __future__ import annotations

import threading
from pathlib import Path

from hostcallback.receiver.errors import UnboundConsumerError
from hostcallback.receiver.messages import Consumer, Lease, Message, Registry, Sink
from hostcallback.receiver.sinks.factory import BoundTap
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class DescribedRegistry(Registry):
    """Reads more of the descriptor file when a message names an unknown consumer. Any thread."""

    def __init__(self, path: Path) -> None:
        """`path`: a segment of a tap log, which the parent appends to."""
        super().__init__()
        self._reader = SegmentReader(path)
        self._reading = (
            threading.Lock()
        )  # protects everything below: the file is read by one thread at a time
        self._leases_of_all: dict[int, Lease] = {}

    def find(self, consumer_id: int) -> Consumer | None:
        """See `Registry`."""
        found = super().find(consumer_id)
        if found is None:
            self._read_on()
            found = super().find(consumer_id)
        return found

    def _read_on(self) -> None:
        with self._reading:
            for _ in self._reader.chunks():
                pass
            for consumer_id, (_, described) in self._reader.consumers.items():
                if consumer_id not in self._leases_of_all:
                    consumer = BoundTap(described, None, unbound=_refuse).consumer
                    self._leases_of_all[consumer_id] = self.lease(consumer)


def _refuse(described: TapDescriptor) -> Sink:
    def report(message: Message) -> None:
        raise UnboundConsumerError(
            f"messages of the tap {described.name!r} at {described.source_line} need a function of another process"
        )

    return report
