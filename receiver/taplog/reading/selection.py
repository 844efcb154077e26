"""Which messages of a log somebody wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from receiver.taplog.format.layout import NO_STEP
from receiver.taplog.reading.chunk_reader import Chunk

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a reader is to yield; by default everything. A message must meet all conditions.

    Attributes:
        names: patterns as of file names, of which the tap's name must match one; empty for all.
        first_step: the first step wanted.
        last_step: the last one; messages that belong to no step are left out if either is given.
        devices: names such as `cpu:0`, of which the device's must match one as a pattern; empty for all.
        since_ns: Unix time; what was emitted before it is left out.
        until_ns: Unix time; what was emitted at that time or later is left out.
    """

    names: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    devices: tuple[str, ...] = ()
    since_ns: int | None = None
    until_ns: int | None = None

    def wants_name(self, name: str) -> bool:
        """Whether taps of that name are wanted."""
        return not self.names or any(fnmatchcase(name, pattern) for pattern in self.names)

    def wants_device(self, device: str) -> bool:
        """Whether messages of that device are wanted."""
        return not self.devices or any(fnmatchcase(device, pattern) for pattern in self.devices)

    @property
    def by_step(self) -> bool:
        """Whether steps matter."""
        return self.first_step is not None or self.last_step is not None

    def wants_chunk(self, chunk: Chunk, wanted: Mapping[int, bool]) -> bool:
        """Whether a chunk may hold a message that is wanted, by its header; `wanted` tells it of consumers' numbers."""
        if self.since_ns is not None and chunk.max_time_ns < self.since_ns:
            return False
        if self.until_ns is not None and chunk.min_time_ns >= self.until_ns:
            return False
        if self.by_step:
            # Steps may fall within a chunk, as where a program begins anew: these are the bounds of all.
            if chunk.max_step == NO_STEP:
                return False
            if self.first_step is not None and chunk.max_step < self.first_step:
                return False
            if self.last_step is not None and chunk.min_step > self.last_step:
                return False
        if not self.names or chunk.consumers == 2**64 - 1:
            return True
        mask = 0
        for number, is_wanted in wanted.items():
            mask |= is_wanted << (number & 63)
        return bool(chunk.consumers & mask)

    def choose(self, times_ns: Array, steps: Array) -> Array:
        """Which messages are wanted, by their times and steps: a mask."""
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
