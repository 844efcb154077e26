"""The streams that a collector delivers, each with its position, and their groups by program run."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver import limits
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.stream_reader import StoredRuns
from hostcallback.receiver.replayer.log_delivery import LogDelivery
from hostcallback.receiver.sinks.sharding.multi_process import ProgramRun, ShardStream
from hostcallback.receiver.taplog.reading.merge import Record, Stretch
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

PATIENCE_SEC = 300.0
"""Seconds for which a stream that is far ahead waits for the streams behind it, counted from the last time that one of
them grew. Incomplete values of a run that was restarted are discarded once it has sent nothing for as long."""


@dataclass(slots=True)
class _Known:
    # A program run, the times at which its streams grew last, and the number of devices of each.
    run: str
    job: ProgramRun
    grown_at: dict[StreamKey, float] = field(default_factory=dict)
    devices: dict[StreamKey, Callable[[], int]] = field(default_factory=dict)
    held_since: float | None = None
    # Streams for which the others waited in vain. They are not waited for again until one of them grows.
    not_awaited: frozenset[StreamKey] | None = None

    def last_grown(self) -> float:
        return max(self.grown_at.values())

    def is_paused(self, key: StreamKey) -> bool:
        return self.job.is_paused(key, self.devices[key]())


class ProgramRunStreams:
    """The program runs of all streams that name one. One thread."""

    def __init__(self, patience_sec: float = PATIENCE_SEC) -> None:
        """No program run is known yet. `patience_sec`: see `PATIENCE_SEC`."""
        self._patience_sec = patience_sec
        self._jobs: dict[tuple[str, str], _Known] = {}
        self._of: dict[StreamKey, _Known] = {}

    def stream(
        self,
        key: StreamKey,
        job: str,
        *,
        wants: Callable[[TapDescriptor], bool],
        devices: Callable[[], int],
        mark: Callable[[Message], object],
        see: Callable[[Message, Sink], Sink],
    ) -> ShardStream | None:
        """Returns the stream of shards that a stored stream brings to its program run; None if it names no run.

        Args:
            key: the stored stream.
            job: the program run that it names.
            wants: see `ShardStream`.
            devices: returns the number of devices of the stream's process.
            mark: see `ShardStream`.
            see: see `ShardStream`.
        """
        if not job:
            return None
        known = self._jobs.get((key.run, job))
        if known is None:
            known = self._jobs[key.run, job] = _Known(key.run, ProgramRun())
        self._of[key] = known
        known.grown_at[key] = time.monotonic()
        known.devices[key] = devices
        known.not_awaited = None
        return ShardStream(known.job, key, key.process, wants, mark, see)

    def grew(self, key: StreamKey) -> None:
        """Notes that a stream has grown."""
        known = self._of.get(key)
        if known is not None:
            known.grown_at[key] = time.monotonic()
            if known.not_awaited is not None and key in known.not_awaited:
                known.not_awaited = None

    def is_paused(self, key: StreamKey) -> bool:
        """Whether a stream is ahead of others and must wait for them."""
        known = self._of.get(key)
        return known is not None and known.is_paused(key)

    def pending(self) -> Iterator[tuple[StreamKey, Any]]:
        """Shards of incomplete values: the stream of each, and its mark there."""
        for known in self._jobs.values():
            for origin in known.job.pending():
                if isinstance(origin.stream, StreamKey):
                    yield origin.stream, origin.mark

    @property
    def pending_values(self) -> int:
        """Number of incomplete values."""
        return sum(known.job.pending_values for known in self._jobs.values())

    def take_given_up(self) -> Iterator[tuple[str, int]]:
        """Numbers of values that were discarded since the last call, by tap and reason."""
        for known in self._jobs.values():
            yield from known.job.discarded.items()
            known.job.discarded.clear()

    def expire_stalled(self) -> None:
        """Discards the values that have waited too long.

        Raises:
            Exception: a consumer raised it.
        """
        now = time.monotonic()
        self._relieve_memory()
        for known in self._jobs.values():
            held = [key for key in known.grown_at if known.is_paused(key)]
            if held:
                self._relieve(known, held, now)
            else:
                known.held_since = None
                if known.job.pending_values and self._is_over(known, now):
                    known.job.discard()

    def _relieve_memory(self) -> None:
        # Each run has a limit. This one is for all runs together.
        sizes = {name: known.job.pending_bytes for name, known in self._jobs.items()}
        while sum(sizes.values()) > limits.PENDING_BYTES:
            name = max(sizes, key=lambda name: sizes[name])
            job = self._jobs[name].job
            job.evict_oldest()
            if job.pending_bytes >= sizes[name]:
                job.discard()
            sizes[name] = job.pending_bytes

    def _relieve(self, known: _Known, held: list[StreamKey], now: float) -> None:
        if known.held_since is None:
            known.held_since = now
        leaders = known.job.leaders()
        behind = [key for key in known.grown_at if key.process not in leaders]
        since = max([known.held_since, *(known.grown_at[key] for key in behind)])
        if known.not_awaited is None:
            if now - since < self._patience_sec:
                return
            known.not_awaited = frozenset(behind)
        while all(known.is_paused(key) for key in held):
            known.job.evict_oldest()

    def _is_over(self, known: _Known, now: float) -> bool:
        # Whether the program was restarted, and this run sends nothing any more.
        last = known.last_grown()
        if now - last < self._patience_sec:
            return False
        processes = {key.process for key in known.grown_at}
        return any(
            other.run == known.run
            and other is not known
            and other.last_grown() > last
            and any(key.process in processes for key in other.grown_at)
            for other in self._jobs.values()
        )


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
        self.delivery: LogDelivery
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
            if not isinstance(record, Stretch):
                yield record
                continue
            for part in self._parts(record):
                yield part
                self.runs.done = part.stop
                if is_over() and part.stop < record.stop:
                    return

    def everything(self, stored: StreamOffset) -> Iterator[Record]:
        """Yields all new records up to `stored`, then what must be read again of a chunk that was delivered in part."""
        again = map(self._placed, self.runs.read_again_of_done())
        for record in itertools.chain(self._read(stored, math.inf, lambda: False), again):
            if isinstance(record, Stretch):
                yield from self._parts(record)
            else:
                yield record

    def _parts(self, run: Stretch) -> Iterator[Stretch]:
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

    def _placed(self, record: Record) -> Record:
        if isinstance(record, Stretch):
            self.at = self.runs.position, record.device
        return record
