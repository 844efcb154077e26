"""Summaries of a scalar over time: buckets of messages with their bounds, smallest, largest and mean values."""

from __future__ import annotations

import numpy as np

from hostcallback.receiver.wire.dtypes import Array

STEP, LAST_STEP, TIME, LAST_TIME, MIN, MAX, SUM, COUNT = range(8)
"""The columns of a bucket: bounds of its steps and Unix times in seconds, smallest and largest finite value, the sum of
the finite ones, and the number of finite ones."""

COLUMNS = 8
MESSAGES = 64
"""Messages that one bucket summarizes at first."""


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
    if finite.all():
        low, high, total = values.min(axis=1), values.max(axis=1), values.sum(axis=1)
        counts = np.full(len(values), float(values.shape[1]))
    else:
        low = np.where(finite, values, np.inf).min(axis=1)
        high = np.where(finite, values, -np.inf).max(axis=1)
        total = np.where(finite, values, 0.0).sum(axis=1)
        counts = finite.sum(axis=1).astype(np.float64)
    found[:, STEP] = np.minimum.reduceat(steps, starts)
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
    for column in (STEP, TIME, MIN):
        found[:, column] = np.minimum.reduceat(buckets[:, column], starts)
    for column in (LAST_STEP, LAST_TIME, MAX):
        found[:, column] = np.maximum.reduceat(buckets[:, column], starts)
    for column in (SUM, COUNT):
        found[:, column] = np.add.reduceat(buckets[:, column], starts)
    return found


class Buckets:
    """The buckets of one scalar. They become coarser where there would be too many."""

    __slots__ = ("_rows", "count", "has_steps")

    def __init__(self) -> None:
        """There are none yet.

        Attributes:
            count: number of buckets.
            has_steps: whether all messages so far have a step.
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
