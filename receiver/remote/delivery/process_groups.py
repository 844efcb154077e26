"""Groups a collector's streams by program run, for values that several processes shard, and pauses those far ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver import limits
from hostcallback.receiver.messages.message import Message, Sink
from hostcallback.receiver.remote.streams import StreamKey
from hostcallback.receiver.sinks.sharding.multi_process import ProgramRun, ShardStream
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
