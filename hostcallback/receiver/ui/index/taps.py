"""The table of the taps that the page shows: a row per run, tap and leaf, with counts of different items."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.metric_writers.reduction import HISTOGRAM, IMAGE
from hostcallback.receiver.taplog.columns.column_batches import Column
from hostcallback.receiver.taplog.render import joined
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index.buckets import Buckets
from hostcallback.receiver.wire.array_types import Array

BITS = 1 << 23
"""In one mebibyte. A million items are counted to within about 0.1 %, few items almost always exactly."""


class DistinctCounter:
    """Counts distinct items approximately. One thread."""

    def __init__(self) -> None:
        """There are none yet."""
        self._bits = bytearray()
        self._set = 0

    def add(self, item: Hashable) -> None:
        """Counts an item, if it is new."""
        if not self._bits:
            self._bits = bytearray(BITS // 8)
        place = hash(item) % BITS
        if not self._bits[place >> 3] >> (place & 7) & 1:
            self._bits[place >> 3] |= 1 << (place & 7)
            self._set += 1

    @property
    def count(self) -> int:
        """The approximate number of different items, at most 100 million."""
        free = max(1 - self._set / BITS, 1 / BITS)
        return round(-BITS * math.log(free))


MAX_TAPS = 50_000
"""Rows beyond these are counted, not kept."""

MAX_BUCKETS = 1_000_000
"""Buckets of all scalars together; 64 bytes each."""

MAX_OF_ONE, FEWEST_OF_ONE = 1 << 17, 64
"""Bounds of the number of buckets of one scalar."""

MAX_NONFINITE = 100
"""Values of a scalar that are not finite, of which the places are kept."""

LANES = 1024
"""A number under vmap with more lanes is shown as an array."""

HISTOGRAM_SIZE = 32
"""Arrays of at least that many numbers are shown as histograms over time."""


@dataclass(slots=True)
class Tap:
    """One leaf of one tap of one run.

    Attributes:
        number: its id for the page.
        run: name of the run.
        name: of the tap.
        leaf: the leaf's path; empty if the value is one leaf.
        is_metric: whether its leaf is a metric, which readers know by the leaf's name alone.
        kind: "scalar", "histogram", "image", "array", "text", "time" of a place that is timed, or "check" of a
            running process.
        place: source line of the tap.
        is_complex: whether its values are complex numbers, of which the magnitudes are shown.
        count: messages so far.
        last: last value of a scalar, and its time in Unix seconds.
        without_step: messages of a scalar whose step is not known.
        buckets: summary of a scalar, or of the seconds of each call.
        nonfinite: (step, Unix time, value) of the first values that are not finite, ascending by step or time.
        nonfinite_count: messages with such values.
        chunks: of what is no scalar: the number of each chunk with messages, ...
        counts: ... and how many messages it has.
    """

    number: int
    run: str
    name: str
    leaf: str
    kind: str
    place: str
    is_metric: bool = False
    is_complex: bool = False
    count: int = 0
    last: float | None = None
    last_time: float = 0.0
    without_step: int = 0
    buckets: Buckets = field(default_factory=Buckets)
    nonfinite: Sequence[
        tuple[float, float, str]
    ] = ()  # a list would be one more object for each of a million taps
    nonfinite_count: int = 0
    chunks: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("q"))

    @property
    def title(self) -> str:
        """What it is for readers: a metric's own name, of other taps both names."""
        return self.leaf if self.is_metric and self.leaf else joined(self.name, self.leaf)

    @property
    def is_logged(self) -> bool:
        """Whether a log has messages of it: all others are of running processes."""
        return bool(self.chunks) or self.kind not in ("array", "check")

    @property
    def last_finite(self) -> float | None:
        """The last value of a scalar, unless it is not finite."""
        return self.last if self.last is not None and math.isfinite(self.last) else None

    def as_dict(self) -> dict[str, Any]:
        """Describes it for the page."""
        return {
            "id": self.number,
            "run": self.run,
            "name": printable(self.name),
            "field": printable(self.leaf),
            "title": printable(self.title),
            "kind": self.kind,
            "complex": self.is_complex,
            "count": self.count,
            "place": printable(self.place),
            "unit_x": "step" if self.buckets.has_steps else "message",
            "last": self.last_finite,
            "enabled": None,
        }

    def note_nonfinite(self, values: Array, steps: Array, times: Array) -> None:
        """Counts values that are not finite, and remembers the first places; shapes as in `of_messages`.

        Chunks come in any order.
        """
        where = np.flatnonzero(~np.isfinite(values).all(axis=1))
        self.nonfinite_count += len(where)
        places = (steps if self.buckets.has_steps else times)[where]
        first = np.argsort(places, kind="stable")[:MAX_NONFINITE]
        found = [*self.nonfinite]
        for place in where[first].tolist():
            (bad, *_) = values[place][~np.isfinite(values[place])]
            text = "nan" if np.isnan(bad) else "inf" if bad > 0 else "-inf"
            found.append((float(steps[place]), float(times[place]), text))
        column = 0 if self.buckets.has_steps else 1
        self.nonfinite = sorted(found, key=lambda mark: mark[column])[:MAX_NONFINITE]


class TapTable:
    """All taps. Only the thread that fills the index adds to it."""

    def __init__(self) -> None:
        """There are none yet.

        Attributes:
            rows: the taps.
            left_out: the taps that are too many.
            most_buckets: how many buckets one scalar may have now.
        """
        self.rows: list[Tap] = []
        self.most_buckets = MAX_OF_ONE
        self.left_out = DistinctCounter()
        self._by_key: dict[tuple[str, str, str, str, bool], Tap | None] = {}

    def of(
        self,
        run: str,
        name: str,
        leaf: str,
        kind: str,
        place: str,
        *,
        is_metric: bool = False,
        is_complex: bool = False,
    ) -> Tap | None:
        """The row of a leaf, which is made if there is none; None if there are too many."""
        # A tap that prints has a row for its text, and one for each leaf.
        key = run, name, leaf, place, kind == "text"
        if key in self._by_key:
            return self._by_key[key]
        if len(self.rows) >= MAX_TAPS:
            self.left_out.add(key)
            return None
        tap = self._by_key[key] = Tap(len(self.rows), run, name, leaf, kind, place, is_metric, is_complex)
        self.rows.append(tap)
        self.most_buckets = max(FEWEST_OF_ONE, min(MAX_OF_ONE, MAX_BUCKETS // len(self.rows)))
        return tap


def kind_of(form: str, column: Column, first: Array) -> str:
    """How a leaf is shown: `form` is that of a metric, `first` its first value.

    What has the shape of a picture, and pixels from 0 to 1 as the first value, is a picture.
    """
    if not (np.issubdtype(column.dtype, np.number) or column.dtype.kind in "bV"):
        return "array"
    size = int(np.prod(column.shape, dtype=np.int64)) * int(np.prod(column.lanes, dtype=np.int64))
    if not column.shape and size <= LANES:
        return "scalar"
    shape = column.shape
    is_plane = not column.lanes and (len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4)))
    if form == IMAGE and is_plane:
        return "image"
    if form != HISTOGRAM and is_plane and min(shape[:2]) >= 4:
        if column.dtype == np.uint8:
            return "image"
        if column.dtype.kind in "fV" and first.min() >= 0 and 0.5 <= first.max() <= 1:
            return "image"
    return "histogram" if size >= HISTOGRAM_SIZE else "array"
