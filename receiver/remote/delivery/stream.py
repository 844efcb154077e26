"""One stream that a collector delivers: its position, its open file, and the length of its turns."""

from __future__ import annotations

import itertools
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
"""Seconds after which a turn ends if a consumer is slow, also within a chunk. A turn delivers at least one message."""

PART_MESSAGES = 1024
"""Largest number of messages that are decoded at a time."""

PART_SEC = 0.1
"""Seconds that a part of a run may take, beyond which the next parts are smaller."""

IDLE_SEC = 60.0
"""Seconds without growth after which a stream's file is closed: streams end, but collectors run for months."""


class DeliveredStream:
    """Reads one stored stream in turns. One thread.

    Attributes:
        runs: reads the stream.
        delivery: delivers its messages; set by the creator.
        at: position from which the current messages can be read again, and their device.
        read_at: time of `time.monotonic` at which it was read last.
    """

    def __init__(self, runs: StoredRuns) -> None:
        """Nothing of the stream has been read yet."""
        self.runs = runs
        self.delivery: RunDelivery
        self.at = runs.position, ""
        self.read_at = -math.inf
        self._is_open = False
        self._part = 1  # grows while consumers are fast

    def turn(self, stored: StreamOffset, is_enough: Callable[[], bool]) -> Iterator[Record]:
        """Yields new records up to `stored`, about as many as fit into one turn. `is_enough` ends the turn earlier.

        Runs of messages come in parts. A turn may end between the parts of one chunk: the next turn reads it again,
        and continues after the parts that were delivered.
        """
        # Reading counts only up to the first message, so that a large chunk is not read for a few messages at a time.
        until = math.inf

        def is_over() -> bool:
            return time.monotonic() >= until or is_enough()

        began = time.monotonic()
        for record in self._read(stored, TURN_BYTES, is_over):
            if until == math.inf:
                now = time.monotonic()
                until = now + max(TURN_SEC, now - began)
            if not isinstance(record, MessageRun):
                yield record
                continue
            for part in self._parts(record):
                yield part
                self.runs.done = part.stop
                if is_over() and part.stop < record.stop:
                    return

    def everything(self, stored: StreamOffset) -> Iterator[Record]:
        """Yields all new records up to `stored`, and what must be read again of a chunk that was delivered in part."""
        for record in itertools.chain(
            self._read(stored, math.inf, lambda: False), self._read_again_of_done()
        ):
            if isinstance(record, MessageRun):
                yield from self._parts(record)
            else:
                yield record

    def _parts(self, run: MessageRun) -> Iterator[MessageRun]:
        # In parts, so that no more messages are decoded at a time, a failure takes no more of them along, and slow
        # consumers end the turn in time.
        start = run.start
        while start < run.stop:
            stop = min(start + self._part, run.stop)
            began = time.monotonic()
            yield run._replace(start=start, stop=stop)
            took = time.monotonic() - began
            if took > PART_SEC:
                self._part = max(1, self._part // 4)
            elif took < PART_SEC / 4:
                self._part = min(PART_MESSAGES, 2 * self._part)
            start = stop

    def rest_if_idle(self, now: float) -> None:
        """Closes the file if the stream has not been read for long. `now` is a time of `time.monotonic`."""
        if self._is_open and self.read_at < now - IDLE_SEC:
            self.runs.rest()
            self._is_open = False

    def _read(
        self, stored: StreamOffset, limit_bytes: float, is_enough: Callable[[], bool]
    ) -> Iterator[Record]:
        self.read_at = time.monotonic()
        self._is_open = True
        for record in self.runs.read(stored, limit_bytes, is_enough):
            yield self._placed(record)

    def _read_again_of_done(self) -> Iterator[Record]:
        return map(self._placed, self.runs.read_again_of_done())

    def _placed(self, record: Record) -> Record:
        if isinstance(record, MessageRun):
            self.at = self.runs.position, record.device
        return record
