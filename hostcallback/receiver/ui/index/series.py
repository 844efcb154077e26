"""Answers for charts: a scalar between two bounds, reduced to a number of points."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.ui.index import buckets
from hostcallback.receiver.ui.index.block_reader import ScalarPart
from hostcallback.receiver.ui.index.buckets import COUNT, LAST_STEP, LAST_TIME, MAX, MIN, STEP, SUM, TIME
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.index.taps import Tap
from hostcallback.receiver.wire.array_types import Array

AXES = "step", "time", "elapsed", "message"

DETAIL_CHUNKS = 96
"""Chunks that are read from the log for one chart; beyond, the chart is of summaries."""

MAX_POINTS = 10_000


class Detail:
    """Collects the messages of some taps from chunks that are read again: by the number of the tap, as buckets."""

    def __init__(self, *taps: Tap) -> None:
        """There are none yet."""
        self.rows: dict[int, list[Array]] = {tap.number: [] for tap in taps}

    def scalar(self, tap: Tap, part: ScalarPart) -> None:
        """Takes messages."""
        if tap.number in self.rows:
            self.rows[tap.number].append(part.rows)

    def times(self, tap: Tap, part: ScalarPart, by_device: dict[str, Array]) -> None:
        """Takes messages of a place that is timed."""
        self.scalar(tap, part)

    def other(self, tap: Tap, count: int) -> None:
        """Leaves out other taps."""

    def check(self, run: Any, described: Any, places: Array) -> None:
        """Leaves out checks."""


def chart(
    index: LogIndex, tap: Tap, points: int, low: float | None, high: float | None, axis: str | None
) -> dict[str, Any]:
    """Describes a scalar for the page.

    Args:
        index: has the tap.
        tap: a scalar.
        points: largest number of points.
        low: first x; None for the tap's first.
        high: last x; None for the tap's last.
        axis: one of `AXES`; None for steps where all messages have one. Elapsed are the seconds since the run began.
    """
    with index.lock:
        start = index.started(tap.run) if axis == "elapsed" else 0.0
        rows, by_step, without_step = tap.buckets.rows.copy(), tap.buckets.has_steps, tap.without_step
        nonfinite, nonfinite_count, count = list(tap.nonfinite), tap.nonfinite_count, tap.count
    axis = axis or ("step" if by_step else "message")
    if axis == "step" and not by_step:
        axis = "message"
    marks = _marks(nonfinite, rows, axis, start)
    # Copies of all rows are most of the time: they are made where they change something.
    if axis == "step" and without_step:
        rows = rows[rows[:, STEP] != float(NO_STEP)]
    x0, x1 = _bounds(rows, axis, start)
    if (x0[1:] < x0[:-1]).any():
        order = np.argsort(x0, kind="stable")
        rows, x0, x1 = rows[order], x0[order], x1[order]
    whole = (float(x0[0]), float(x1.max())) if len(rows) else (None, None)
    is_zoomed = low is not None or high is not None
    if is_zoomed:
        inside = (x1 >= (-np.inf if low is None else low)) & (x0 <= (np.inf if high is None else high))
        rows, x0, x1 = rows[inside], x0[inside], x1[inside]
    if is_zoomed and len(rows) and len(rows) < points and rows[:, COUNT].sum() > len(rows):
        rows, x0 = _detailed(index, tap, rows, x0, x1, axis, start)
        keep = np.ones(len(rows), np.bool_)
        keep &= x0 >= (-np.inf if low is None else low)
        keep &= x0 <= (np.inf if high is None else high)
        rows, x0 = rows[keep], x0[keep]
    shown, x = _reduced(rows, x0, points)
    has_value = shown[:, COUNT] > 0
    is_reduced = len(shown) < len(rows)
    shown, x = shown[has_value], x[has_value]
    exact = not is_reduced and bool((shown[:, COUNT] == 1).all())
    return {
        "tap": tap.number,
        "axis": axis,
        "x": x.tolist(),
        "min": shown[:, MIN].tolist(),
        "max": shown[:, MAX].tolist(),
        "mean": (shown[:, SUM] / np.maximum(shown[:, COUNT], 1)).tolist(),
        "count": count,
        "exact": exact,
        "first": whole[0],
        "last": whole[1],
        "nonfinite": marks,
        "nonfinite_count": nonfinite_count,
    }


def _marks(
    nonfinite: list[tuple[float, float, str]], rows: Array, axis: str, start: float
) -> list[list[float | str]]:
    # The x and the text of values that are not finite, ascending.
    if axis == "step":
        places = [step for step, _, _ in nonfinite if step != float(NO_STEP)]
        texts = [text for step, _, text in nonfinite if step != float(NO_STEP)]
    elif axis == "message":
        # Messages are counted by their finite values: such a value is between two of them.
        ordered = rows[np.argsort(rows[:, TIME], kind="stable")]
        before = np.cumsum(ordered[:, COUNT]) - ordered[:, COUNT]
        times = [at for _, at, _ in nonfinite]
        has_finite = bool(rows[:, COUNT].any())
        places = np.interp(times, ordered[:, TIME], before).tolist() if has_finite else [*range(len(times))]
        texts = [text for _, _, text in nonfinite]
    else:
        places, texts = [at - start for _, at, _ in nonfinite], [text for _, _, text in nonfinite]
    return [[x, text] for x, text in sorted(zip(places, texts, strict=True), key=lambda mark: mark[0])]


def _bounds(rows: Array, axis: str, start: float) -> tuple[Array, Array]:
    # The smallest and largest x of each bucket.
    if axis == "step":
        return rows[:, STEP], rows[:, LAST_STEP]
    if axis != "message":
        return rows[:, TIME] - start, rows[:, LAST_TIME] - start
    order = np.argsort(rows[:, TIME], kind="stable")
    after = np.cumsum(rows[order, COUNT])
    first = np.empty(len(rows))
    last = np.empty(len(rows))
    first[order], last[order] = after - rows[order, COUNT], after - 1
    return first, np.maximum(first, last)


def _detailed(
    index: LogIndex, tap: Tap, rows: Array, x0: Array, x1: Array, axis: str, start: float
) -> tuple[Array, Array]:
    # The single messages of these buckets, and the x of each; the buckets if the messages are in too many chunks.
    if axis == "step":
        detail = _read_detail(index, tap, float(x0.min()), float(x1.max()), by_step=True)
    else:
        low, high = float(rows[:, TIME].min()), float(rows[:, LAST_TIME].max())
        detail = _read_detail(index, tap, low, high, by_step=False)
    if detail is None:
        return rows, x0
    column = STEP if axis == "step" else TIME
    detail = detail[np.argsort(detail[:, column], kind="stable")]
    if axis == "message":
        return detail, x0.min() + np.arange(len(detail))
    return detail, detail[:, column] - (0.0 if axis == "step" else start)


def _reduced(rows: Array, x: Array, points: int) -> tuple[Array, Array]:
    # At most that many buckets, of even width, and the x of each: the middle of its messages.
    if len(rows) <= points:
        return rows, x
    low, high = float(x[0]), float(x[-1])
    width = (high - low) / points or 1.0
    cells = np.minimum(((x - low) / width).astype(np.int64), points - 1)
    starts = np.append(0, np.flatnonzero(cells[1:] != cells[:-1]) + 1)
    return buckets.merged(rows, starts), np.add.reduceat(x, starts) / np.diff(np.append(starts, len(x)))


def _read_detail(index: LogIndex, tap: Tap, low: float, high: float, *, by_step: bool) -> Array | None:
    # The single messages of the tap; None if they are in too many chunks.
    with index.lock:
        numbers = index.chunks.within(low, high, by_step=by_step)
        numbers = numbers[numbers < len(index.chunks)]
    numbers = index.with_tap(tap, numbers)
    if len(numbers) > DETAIL_CHUNKS:
        return None
    found = Detail(tap)
    for number in numbers.tolist():
        index.read_again(number, found)
    if not found.rows[tap.number]:
        return None
    rows = np.concatenate(found.rows[tap.number])
    column = STEP if by_step else TIME
    if by_step:
        rows = rows[rows[:, STEP] != float(NO_STEP)]
    inside: Array = rows[(rows[:, column] >= low) & (rows[:, column] <= high)]
    return inside
