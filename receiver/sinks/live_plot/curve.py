"""A curve of any number of values in bounded memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.wire.dtypes import Array


class Points(NamedTuple):
    """The points of a curve, arrays of float64 and of one length.

    Attributes:
        steps: the first step of each point.
        means: mean of the point's values; NaN if one of them is not finite.
        lows: smallest finite value; NaN if there is none.
        highs: largest finite value; NaN if there is none.
        smooth: exponential moving average of all values up to the point's last.
    """

    steps: Array
    means: Array
    lows: Array
    highs: Array
    smooth: Array


class Curve:
    """Values by step, in at most `max_points` points. Not thread-safe.

    A point covers `stride` consecutive values. When there are too many points, each two become one, and the stride
    doubles. The smallest and the largest value of a point are kept, so that no spike is lost.

    Attributes:
        count: number of values.
        nonfinite: number of values that are NaN or infinite.
        stride: number of values that a point covers.
    """

    def __init__(self, max_points: int, smooth: float) -> None:
        """`smooth` is the weight of the past in the moving average, 0 for none."""
        self.count = self.nonfinite = 0
        self.stride = 1
        self._weight = smooth
        self._average, self._total = 0.0, 0.0
        self._rows: Any = np.empty((max_points, len(Points._fields)))
        self._used = 0
        self._filled = 0  # values of the last point

    def add(self, step: float, value: float) -> None:
        """Adds a value."""
        self.count += 1
        finite = math.isfinite(value)
        self.nonfinite += not finite
        if finite:
            self._average = self._weight * self._average + (1 - self._weight) * value
            self._total = self._weight * self._total + (1 - self._weight)
        average = self._average / self._total if self._total else math.nan
        value = value if finite else math.nan
        if self._filled == self.stride or not self._used:
            if self._used == len(self._rows):
                self._halve()
            self._rows[self._used] = step, value, value, value, average
            self._used += 1
            self._filled = 1
            return
        row = self._rows[self._used - 1]
        self._filled += 1
        row[1] += (value - row[1]) / self._filled
        row[2], row[3], row[4] = np.fmin(row[2], value), np.fmax(row[3], value), average

    def _halve(self) -> None:
        rows = self._rows
        one, other = rows[0::2], rows[1::2]
        half = len(other)
        merged = np.stack(
            [
                one[:, 0], (one[:, 1] + other[:, 1]) / 2, np.fmin(one[:, 2], other[:, 2]),
                np.fmax(one[:, 3], other[:, 3]), other[:, 4],
            ],
            axis=1,
        )  # fmt: skip
        rows[:half] = merged
        self._used = half
        self.stride *= 2

    def points(self) -> Points:
        """A copy of the points."""
        return Points(*self._rows[: self._used].T.copy())
