"""The consumers of another process, by the descriptions that it writes down."""

from __future__ import annotations

import threading
from pathlib import Path

from receiver.errors import UnboundConsumerError
from receiver.messages.message import Consumer, Message, Sink
from receiver.messages.registry import Lease, Registry
from receiver.sinks.factory import BoundTap
from receiver.taplog.reading.segment_reader import SegmentReader
from receiver.wire.tap_descriptor import TapDescriptor


class DescribedRegistry(Registry):
    """Reads on in the file of descriptions when a message comes for a consumer that it does not know. Any thread."""

    def __init__(self, path: Path) -> None:
        """`path`: a segment of a tap log."""
        super().__init__()
        self._reader = SegmentReader(path)
        self._reading = threading.Lock()
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
            f"messages of the tap {described.name!r} at {described.source_line}, whose function is in another process"
        )

    return report
