"""One stream that a collector delivers: its position, its open file, and the length of its turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from hostcallback.receiver.remote.spool.stream_reader import StoredRuns
from hostcallback.receiver.remote.streams import StreamOffset
from hostcallback.receiver.replayer.run_delivery import RunDelivery
from hostcallback.receiver.taplog.reading.merge import MessageRun, Record

TURN_BYTES = 4 << 20
"""Bytes of one stream that are delivered before the next stream's turn."""

TURN_SEC = 0.5
"""Seconds after which a turn ends if a consumer is slow. A turn delivers at least one chunk of the log."""

IDLE_SEC = 60.0
"""Seconds without growth after which a stream's file is closed: streams end, but collectors run for months."""


class DeliveredStream:
    """Reads one stored stream in turns. One thread.

    Attributes:
        runs: reads the stream.
        delivery: delivers its messages; set by the creator.
        at: position from which the current messages can be read again, and their device.
    """

    def __init__(self, runs: StoredRuns) -> None:
        """Nothing of the stream has been read yet."""
        self.runs = runs
        self.delivery: RunDelivery
        self.at = runs.position, ""
        self._read_at = math.inf  # infinite while no file is open

    def turn(self, stored: StreamOffset, is_enough: Callable[[], bool]) -> Iterator[Record]:
        """Yields new records up to `stored`, about as many as fit into one turn. `is_enough` ends the turn earlier."""
        until = time.monotonic() + TURN_SEC
        yield from self._read(stored, TURN_BYTES, lambda: is_enough() or time.monotonic() >= until)

    def everything(self, stored: StreamOffset) -> Iterator[Record]:
        """Yields all new records up to `stored`."""
        yield from self._read(stored, math.inf, lambda: False)

    def rest_if_idle(self, now: float) -> None:
        """Closes the file if the stream has not been read for long. `now` is a time of `time.monotonic`."""
        if self._read_at < now - IDLE_SEC:
            self.runs.rest()
            self._read_at = math.inf

    def _read(
        self, stored: StreamOffset, limit_bytes: float, is_enough: Callable[[], bool]
    ) -> Iterator[Record]:
        self._read_at = time.monotonic()
        for record in self.runs.read(stored, limit_bytes, is_enough):
            if isinstance(record, MessageRun):
                self.at = self.runs.position, record.device
            yield record
