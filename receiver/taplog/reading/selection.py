"""Conditions that select messages of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from hostcallback.receiver.tap_name import matches
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, NO_STEP
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.wire.dtypes import Array


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions on the messages that a reader yields; by default none. A message must meet all of them.

    Attributes:
        names: patterns, as of file names, of which one must match the tap's name; empty for all.
        first_step: first selected step.
        last_step: last selected step; if either is given, messages without a step are not selected.
        devices: patterns, such as `cpu:0`, of which one must match the device's name; empty for all.
        since_ns: Unix time in nanoseconds; earlier messages are not selected.
        until_ns: Unix time in nanoseconds; messages of that time or later are not selected.

    Example:
        losses = list(receiver.LogReader("run/taps").messages(receiver.Selection(names=("loss",))))
    """

    names: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    devices: tuple[str, ...] = ()
    since_ns: int | None = None
    until_ns: int | None = None

    def wants_name(self, name: str) -> bool:
        """Whether taps of that name are selected."""
        return not self.names or any(matches(name, pattern) for pattern in self.names)

    def wants_device(self, device: str) -> bool:
        """Whether messages of that device are selected."""
        return not self.devices or any(fnmatchcase(device, pattern) for pattern in self.devices)

    @property
    def by_step(self) -> bool:
        """Whether steps are a condition."""
        return self.first_step is not None or self.last_step is not None

    def wants_chunk(self, chunk: Chunk, wanted: Mapping[int, bool]) -> bool:
        """Whether a chunk's header allows selected messages; `wanted` tells for each consumer number whether it is."""
        if self.since_ns is not None and chunk.max_time_ns < self.since_ns:
            return False
        if self.until_ns is not None and chunk.min_time_ns >= self.until_ns:
            return False
        if self.by_step:
            # Steps may decrease within a chunk, as when a program restarts its loop: the header has their bounds.
            if chunk.max_step == NO_STEP:
                return False
            if self.first_step is not None and chunk.max_step < self.first_step:
                return False
            if self.last_step is not None and chunk.min_step > self.last_step:
                return False
        if not self.names or chunk.consumers == ALL_CONSUMERS:
            return True
        mask = 0
        for number, is_wanted in wanted.items():
            mask |= is_wanted << (number & 63)
        return bool(chunk.consumers & mask)

    def choose(self, times_ns: Array, steps: Array) -> Array:
        """Selects messages by times (int64, Unix nanoseconds) and steps (int64); returns a bool mask of that shape."""
        mask = np.ones(len(times_ns), np.bool_)
        if self.since_ns is not None:
            mask &= times_ns >= self.since_ns
        if self.until_ns is not None:
            mask &= times_ns < self.until_ns
        if self.by_step:
            mask &= steps != NO_STEP
            if self.first_step is not None:
                mask &= steps >= self.first_step
            if self.last_step is not None:
                mask &= steps <= self.last_step
        return mask
