"""The chunks of messages of all segments, as columns: which chunks have what, for readers of details."""

from __future__ import annotations

from array import array

import numpy as np

from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.wire.dtypes import Array

_SIGNED = ("segment", "offset", "min_step", "max_step", "min_time", "max_time", "texts", "messages")


class ChunkTable:
    """Columns of the chunks, which have numbers from 0 on. One writer; readers hold the index's lock."""

    def __init__(self) -> None:
        """There are none yet."""
        self._columns = {name: array("q") for name in _SIGNED}
        self._consumers = array("Q")

    def __len__(self) -> int:
        return len(self._consumers)

    def add(self, segment: int, chunk: Chunk) -> int:
        """Adds a chunk of a segment; returns its number."""
        row = (
            segment, chunk.offset, chunk.min_step, chunk.max_step, chunk.min_time_ns, chunk.max_time_ns, 0,
            chunk.messages,
        )  # fmt: skip
        for name, value in zip(_SIGNED, row, strict=True):
            self._columns[name].append(max(-(2**63), min(2**63 - 1, value)))
        self._consumers.append(chunk.consumers)
        return len(self._consumers) - 1

    def column(self, name: str) -> Array:
        """A copy of a column: int64, shape (chunks,)."""
        return np.array(self._columns[name], np.int64)

    def place(self, number: int) -> tuple[int, int]:
        """Segment and offset of a chunk."""
        return self._columns["segment"][number], self._columns["offset"][number]

    def add_texts(self, number: int, count: int) -> None:
        """Counts messages with texts in a chunk."""
        self._columns["texts"][number] += count

    def within(self, low: float, high: float, *, by_step: bool) -> Array:
        """Numbers of the chunks that may have messages of steps, or of Unix seconds, from `low` to `high`."""
        if not by_step:
            least, most = self.column("min_time") / 1e9, self.column("max_time") / 1e9
            return np.flatnonzero((most >= low) & (least <= high))
        least, most = self.column("min_step"), self.column("max_step")
        return np.flatnonzero((most != NO_STEP) & (most >= low) & (least <= high))

    def consumers(self) -> Array:
        """A copy of the masks of consumers: uint64, shape (chunks,)."""
        return np.array(self._consumers, np.uint64)
