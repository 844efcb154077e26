"""Which streams of a collector bring shards of the same values, which of them wait for others, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from receiver.messages.message import Message, Sink
from receiver.remote.streams import StreamKey
from receiver.sinks.sharding.multi_process import ProgramRun, ShardStream
from receiver.wire.tap_descriptor import TapDescriptor

PATIENCE_SEC = 300.0
"""A stream that is far ahead waits until nothing has come of those that are behind for so long. Values of a program
that has begun another life wait for so long, too."""


@dataclass(slots=True)
class _Known:
    # A job, and when its streams grew last; how many devices each has.
    run: str
    job: ProgramRun
    grown_at: dict[StreamKey, float] = field(default_factory=dict)
    devices: dict[StreamKey, Callable[[], int]] = field(default_factory=dict)
    held_since: float | None = None
    # Streams that were waited for in vain, until one of them grows.
    not_awaited: frozenset[StreamKey] | None = None

    def last_grown(self) -> float:
        return max(self.grown_at.values())

    def is_paused(self, key: StreamKey) -> bool:
        return self.job.is_paused(key, self.devices[key]())


class ProgramRunStreams:
    """The jobs of all streams that have one. One thread."""

    def __init__(self, patience_sec: float = PATIENCE_SEC) -> None:
        """Knows of none. `patience_sec`: see `PATIENCE_SEC`."""
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
        """What a stream brings to its job's values; None if it does not say which that is.

        Args:
            key: the stream.
            job: what it says.
            wants: see `ShardStream`.
            devices: how many devices its process has.
            mark: see `ShardStream`.
            see: see there.
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
        """More of a stream is stored."""
        known = self._of.get(key)
        if known is not None:
            known.grown_at[key] = time.monotonic()
            if known.not_awaited is not None and key in known.not_awaited:
                known.not_awaited = None

    def is_paused(self, key: StreamKey) -> bool:
        """Whether the rest of a stream is to be left for later."""
        known = self._of.get(key)
        return known is not None and known.is_paused(key)

    def pending(self) -> Iterator[tuple[StreamKey, Any]]:
        """Where the shards of incomplete values are: their streams, and the marks in these."""
        for known in self._jobs.values():
            for origin in known.job.pending():
                if isinstance(origin.stream, StreamKey):
                    yield origin.stream, origin.mark

    @property
    def pending_values(self) -> int:
        """How many values are incomplete."""
        return sum(known.job.pending_values for known in self._jobs.values())

    def take_given_up(self) -> Iterator[tuple[str, int]]:
        """How many values were given up since the last time, with their taps and the reasons."""
        for known in self._jobs.values():
            yield from known.job.discarded.items()
            known.job.discarded.clear()

    def expire_stalled(self) -> None:
        """Gives up what was waited for too long.

        Raises:
            Exception: what consumers raise.
        """
        now = time.monotonic()
        for known in self._jobs.values():
            held = [key for key in known.grown_at if known.is_paused(key)]
            if held:
                self._relieve(known, held, now)
            else:
                known.held_since = None
                if known.job.pending_values and self._is_over(known, now):
                    known.job.discard()

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
        # Whether its processes have begun another life, and nothing comes of this one any more.
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
