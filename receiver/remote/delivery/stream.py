"""One stream whose messages a collector's consumers get: how far, from which file, and for how long at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from receiver.remote.spool.stream_reader import StoredRuns
from receiver.remote.streams import StreamOffset
from receiver.replayer.run_delivery import RunDelivery
from receiver.taplog.reading.merge import MessageRun, Record

TURN_BYTES = 4 << 20
"""So much of one stream is delivered before it is another one's turn."""

TURN_SEC = 0.5
"""And for no longer, where a consumer is slow, but at least what was written together."""

IDLE_SEC = 60.0
"""The file of a stream that has not grown for so long is closed: streams end, and collectors go on for months."""


class DeliveredStream:
    """One thread.

    Attributes:
        runs: what reads it.
        delivery: what its messages go to; set by whoever makes this.
        at: where to go on to read what is delivered now, and its device.
    """

    def __init__(self, runs: StoredRuns) -> None:
        """Nothing has been read."""
        self.runs = runs
        self.delivery: RunDelivery
        self.at = runs.position, ""
        self._read_at = math.inf  # for ever, where no file is open

    def turn(self, stored: StreamOffset, is_enough: Callable[[], bool]) -> Iterator[Record]:
        """What is new up to `stored`, about as much as one turn may take. `is_enough`: whether to stop before that."""
        until = time.monotonic() + TURN_SEC
        yield from self._read(stored, TURN_BYTES, lambda: is_enough() or time.monotonic() >= until)

    def everything(self, stored: StreamOffset) -> Iterator[Record]:
        """All that is new up to `stored`."""
        yield from self._read(stored, math.inf, lambda: False)

    def rest_if_idle(self, now: float) -> None:
        """Closes the file if nothing has been read of it for long. `now` is of `time.monotonic`."""
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
