"""Summaries of a scalar over time, in buckets of messages, and the columns that say which chunks have the details."""

from __future__ import annotations

from array import array

import numpy as np

from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.wire.array_types import Array

STEP, LAST_STEP, TIME, LAST_TIME, MIN, MAX, SUM, COUNT = range(8)
"""The columns of a bucket: bounds of its steps and Unix times in seconds, smallest and largest finite value, the sum of
the finite ones, and the number of finite ones."""

COLUMNS = 8
MESSAGES = 64
"""Messages that one bucket summarizes at first."""


def real_values(values: Array) -> Array:
    """Values as float64: of complex numbers the magnitudes."""
    if values.dtype.kind != "c":
        return values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        magnitudes: Array = np.abs(values.astype(np.complex128))
    return magnitudes


def of_messages(values: Array, steps: Array, times: Array, starts: Array) -> Array:
    """Makes buckets of messages in order.

    Args:
        values: float64, shape (messages, values of a message).
        steps: float64, shape (messages,).
        times: Unix seconds, float64, shape (messages,).
        starts: index of the first message of each bucket, int64, ascending from 0.

    Returns:
        float64, shape (buckets, COLUMNS).
    """
    found = np.empty((len(starts), COLUMNS))
    if not len(starts):
        return found
    finite = np.isfinite(values)
    if values.shape == (len(starts), 1) and finite.all():  # a bucket for each number
        found[:, STEP : LAST_STEP + 1] = steps[:, np.newaxis]
        found[:, TIME : LAST_TIME + 1] = times[:, np.newaxis]
        found[:, MIN : SUM + 1] = values
        found[:, COUNT] = 1.0
        return found
    if finite.all():
        low, high, total = values.min(axis=1), values.max(axis=1), values.sum(axis=1)
        counts = np.full(len(values), float(values.shape[1]))
    else:
        low = np.where(finite, values, np.inf).min(axis=1)
        high = np.where(finite, values, -np.inf).max(axis=1)
        total = np.where(finite, values, 0.0).sum(axis=1)
        counts = finite.sum(axis=1).astype(np.float64)
    found[:, STEP] = _least_steps(steps, starts)
    found[:, LAST_STEP] = np.maximum.reduceat(steps, starts)
    found[:, TIME] = np.minimum.reduceat(times, starts)
    found[:, LAST_TIME] = np.maximum.reduceat(times, starts)
    found[:, MIN] = np.minimum.reduceat(low, starts)
    found[:, MAX] = np.maximum.reduceat(high, starts)
    found[:, SUM] = np.add.reduceat(total, starts)
    found[:, COUNT] = np.add.reduceat(counts, starts)
    return found


def merged(buckets: Array, starts: Array) -> Array:
    """Merges buckets that follow each other; `starts` has the index of the first one of each group."""
    found = np.empty((len(starts), COLUMNS))
    found[:, STEP] = _least_steps(buckets[:, STEP], starts)
    for column in (TIME, MIN):
        found[:, column] = np.minimum.reduceat(buckets[:, column], starts)
    for column in (LAST_STEP, LAST_TIME, MAX):
        found[:, column] = np.maximum.reduceat(buckets[:, column], starts)
    for column in (SUM, COUNT):
        found[:, column] = np.add.reduceat(buckets[:, column], starts)
    return found


def _least_steps(steps: Array, starts: Array) -> Array:
    # `NO_STEP` only where no message has a step.
    least = np.minimum.reduceat(np.where(steps == float(NO_STEP), np.inf, steps), starts)
    return np.where(np.isinf(least), float(NO_STEP), least)


class Buckets:
    """The buckets of one scalar. They become coarser where there would be too many."""

    __slots__ = ("_rows", "count", "has_steps")

    def __init__(self) -> None:
        """There are none yet.

        Attributes:
            count: number of buckets.
            has_steps: whether messages have steps, apart from a few.
        """
        self._rows: Array | None = None
        self.count = 0
        self.has_steps = True

    @property
    def rows(self) -> Array:
        """The buckets, float64, shape (buckets, COLUMNS); in the order in which they came."""
        return np.empty((0, COLUMNS)) if self._rows is None else self._rows[: self.count]

    def add(self, rows: Array, most: int) -> None:
        """Adds buckets. Afterwards there are at most `most`, which is 2 or more."""
        needed = self.count + len(rows)
        if self._rows is None or needed > len(self._rows):
            grown = np.empty((max(8, min(2 * needed, max(most, needed))), COLUMNS))
            grown[: self.count] = self.rows
            self._rows = grown
        self._rows[self.count : needed] = rows
        self.count = needed
        while self.count > most:
            order = np.argsort(self.rows[:, STEP if self.has_steps else TIME], kind="stable")
            fewer = merged(self.rows[order], np.arange(0, self.count, 2))
            self._rows[: len(fewer)] = fewer
            self.count = len(fewer)


_SIGNED = ("segment", "offset", "stream", "min_step", "max_step", "min_time", "max_time", "texts", "messages")


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
            segment, chunk.offset, chunk.stream, chunk.min_step, chunk.max_step, chunk.min_time_ns, chunk.max_time_ns,
            0, chunk.messages,
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
        has = (most != NO_STEP) & (most >= low) & (least <= high)
        # The last messages of a device in a chunk may belong to the first step of the next one.
        segment, stream = self.column("segment"), self.column("stream")
        order = np.lexsort((self.column("offset"), stream, segment))
        first, then = order[:-1], order[1:]
        follows = (segment[first] == segment[then]) & (stream[first] == stream[then])
        before = first[follows & has[then]]
        has[before] = True
        return np.flatnonzero(has)

    def consumers(self) -> Array:
        """A copy of the masks of consumers: uint64, shape (chunks,)."""
        return np.array(self._consumers, np.uint64)
