"""The distributions of the times of places and of the iterations of loops, and the table of these."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.text import text_table

ITERATION = "iteration"
PROGRAM = "program"
"""The names of rows: all places in an iteration of a loop with several, and the whole program."""

BINS_PER_OCTAVE = 64  # a percentile is within 0.6 %


@dataclass(frozen=True, slots=True)
class TimeRow:
    """The times of a place; seconds.

    Attributes:
        place: its name; `program` is the whole program, `iteration` all places in an iteration of a loop with several.
        count: how often it ran: once for each call, iteration and device.
        mean: of these times.
        p50: the median.
        p90: at most that long in 90 of 100 cases.
        p99: at most that long in 99 of 100 cases.
        max: the longest one.
        max_at: which one that was: `step 12`, or `call 12` where no step is known, or `call 3, iteration 40` in a loop;
            calls and iterations count from 0. Empty if there is only one.
        share: of the time of the program; NaN where that is not known.
        slowest: of a program on several devices, the one with the largest mean; else empty.
        spread: the mean of that device divided by the mean of all, minus one.
    """

    place: str
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    max_at: str
    share: float
    slowest: str
    spread: float


class Loop(NamedTuple):
    """The time of each iteration of a loop in one call: of all places in it together.

    Attributes:
        depth: of how many loops in the message: it and those around it. 0 is an iteration of a while loop, which has a
            message for itself.
        places: those that ran.
        seconds: by device, an array with an axis for each of these loops; NaN where no place ran.
        has_several: whether none of the places has all of the time.
    """

    depth: int
    places: set[str]
    seconds: dict[str, np.ndarray[Any, Any]]
    has_several: bool


class _Which(NamedTuple):
    """Which one of the times of a place."""

    step: int | None
    call: int
    iterations: tuple[int, ...]

    def text(self, calls: int) -> str:
        """Says it, of a place that was called that often."""
        parts = []
        if calls > 1:
            # A call with a loop may have a step for each iteration, and its message only the last one.
            knows_step = self.step is not None and not self.iterations
            parts.append(f"step {self.step}" if knows_step else f"call {self.call}")
        if self.iterations:
            parts.append(f"iteration {'/'.join(map(str, self.iterations))}")
        return ", ".join(parts)


class _Distribution:
    def __init__(self) -> None:
        self.total, self.count, self.calls = 0.0, 0, 0
        self.bins: Counter[int] = Counter()
        self.longest: tuple[float, _Which | None] = -math.inf, None
        self.shortest = math.inf

    def add(self, seconds: np.ndarray[Any, Any], step: int | None) -> None:
        """Adds the times of one call, by iteration; NaN where it did not run."""
        ran = seconds[~np.isnan(seconds)]
        self.total += float(ran.sum(dtype=np.float64))
        self.count += ran.size
        self.bins.update(np.round(np.log2(np.maximum(ran, 1e-9)) * BINS_PER_OCTAVE).astype(int).tolist())
        if ran.size and (most := float(ran.max())) > self.longest[0]:
            at = np.unravel_index(int(np.nanargmax(seconds)), seconds.shape)
            self.longest = most, _Which(step, self.calls, tuple(map(int, at)))
        self.shortest = min(self.shortest, float(ran.min(initial=np.inf)))
        self.calls += 1

    def percentile(self, percent: int) -> float:
        """A time that this part of the times does not exceed; NaN where there are none."""
        left = math.ceil(self.count * percent / 100)
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                return math.exp2(number / BINS_PER_OCTAVE)
        return math.nan


@dataclass(eq=False)
class _LoopTimes:
    depth: int
    places: set[str] = field(default_factory=set)
    has_several: bool = False
    by_device: dict[str, _Distribution] = field(default_factory=dict)


def _add(
    known: dict[str, _Distribution], by_device: Mapping[str, np.ndarray[Any, Any]], step: int | None
) -> None:
    for device, times in by_device.items():
        known.setdefault(device, _Distribution()).add(times, step)


class Times:
    """The times of the places of one tap. Any thread."""

    def __init__(self) -> None:
        """There are none yet."""
        self._lock = threading.Lock()  # protects what is below
        self._found: dict[str, dict[str, _Distribution]] = {}
        self._loops: list[_LoopTimes] = []
        self._is_new = False

    def add(
        self,
        seconds: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
        is_printed: bool = False,
        step: int | None = None,
        loops: Sequence[Loop] = (),
    ) -> None:
        """Adds the times of one call.

        Args:
            seconds: by place and device, as from `TimeSink.seconds`.
            is_printed: whether `new_tables` has them.
            step: of the call, where it is known.
            loops: of the call, as from `TimeSink.loops`.
        """
        with self._lock:
            for place, times in seconds.items():
                _add(self._found.setdefault(place, {}), times, step)
            ran = [self._loop_of(loop) for loop in loops]
            for known, loop in zip(ran, loops, strict=True):
                known.places.update(loop.places)
                known.has_several |= loop.has_several
                _add(known.by_device, loop.seconds, step)
            for idle in self._loops:
                if idle not in ran and not idle.places.isdisjoint(seconds):
                    _add(idle.by_device, dict.fromkeys(idle.by_device, np.full((), np.nan)), step)
            self._is_new |= is_printed

    def _loop_of(self, loop: Loop) -> _LoopTimes:
        # In one call some places of a loop may not run, and in the next one others.
        for known in self._loops:
            if known.depth == loop.depth and not known.places.isdisjoint(loop.places):
                return known
        self._loops.append(_LoopTimes(loop.depth))
        return self._loops[-1]

    def rows(self) -> list[TimeRow]:
        """The rows of the table: places in the order of the program, loops of several places, and the program."""
        with self._lock:
            names = (ITERATION if n == 1 else f"{ITERATION}#{n}" for n in itertools.count(1))
            free = (name for name in names if name not in self._found)
            loops = {next(free): loop.by_device for loop in self._loops if self._is_shown(loop)}
            shown = self._found | loops
            found = [_row(place, by_device) for place, by_device in shown.items()]
            totals = {place: sum(one.total for one in each.values()) for place, each in shown.items()}
        whole = totals.get(PROGRAM) or math.nan
        rows = [replace(row, share=totals[row.place] / whole) for row in found]
        return sorted(rows, key=lambda row: (row.place == PROGRAM, row.place in loops))

    def _is_shown(self, loop: _LoopTimes) -> bool:
        # Of loops in each other that have the same places, the innermost one.
        inner = (one for one in self._loops if one.depth > loop.depth)
        return loop.has_several and all(one.places != loop.places for one in inner)

    def bins(self) -> dict[str, Counter[int]]:
        """How often each place took about 2 ** (n / BINS_PER_OCTAVE) seconds, by n."""
        with self._lock:
            return {
                place: sum((one.bins for one in each.values()), Counter())
                for place, each in self._found.items()
            }

    def take_new(self) -> bool:
        """Whether times were added since the last call."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
        return is_new


def _row(place: str, by_device: Mapping[str, _Distribution]) -> TimeRow:
    both = _Distribution()
    for one in by_device.values():
        both.total, both.count = both.total + one.total, both.count + one.count
        both.bins.update(one.bins)
    means = {device: one.total / one.count for device, one in by_device.items() if one.count}
    mean = both.total / both.count if both.count else math.nan
    slowest = max(means, key=means.__getitem__) if len(means) > 1 else ""
    spread = means[slowest] / mean - 1 if slowest else 0.0
    longest, which = max((one.longest for one in by_device.values()), key=lambda one: one[0])
    shortest = min(one.shortest for one in by_device.values())
    # The middle of a bin may be longer or shorter than all that is in it.
    p50, p90, p99 = (float(np.clip(both.percentile(percent), shortest, longest)) for percent in (50, 90, 99))
    at = "" if which is None else which.text(max(one.calls for one in by_device.values()))
    longest = math.nan if which is None else longest
    return TimeRow(place, both.count, mean, p50, p90, p99, longest, at, math.nan, slowest, spread)


times_by_tap: dict[str, Times] = {}
"""The times that this process was sent, by the name of the tap. Guarded by Python's own lock."""


def new_tables(name: str | None = None) -> list[str]:
    """Returns the tables of taps, or of one, that had times since the last call."""
    found = [times for tap, times in list(times_by_tap.items()) if name in (None, tap)]
    return [table(times.rows()) for times in found if times.take_new()]


def table(rows: list[TimeRow]) -> str:
    """Returns rows as a text table."""
    spread = any(row.slowest for row in rows)
    head = ("place", "count", "mean", "p50", "p90", "p99", "max", "share", *(["slowest"] if spread else []))
    lines = []
    for row in rows:
        share = "" if math.isnan(row.share) else f"{100 * row.share:.1f} %"
        slowest = f"{row.slowest} {100 * row.spread:+.1f} %" if row.slowest else ""
        texts = map(duration_text, (row.mean, row.p50, row.p90, row.p99))
        longest = ", ".join(filter(None, (duration_text(row.max), row.max_at)))
        lines.append((row.place, f"{row.count:,}", *texts, longest, share, *([slowest] if spread else [])))
    return "\n".join(text_table(head, lines))


def duration_text(seconds: float) -> str:
    """Returns seconds as text with three digits, such as `1.25 ms`."""
    if math.isnan(seconds):
        return "-"
    if seconds >= 1000:
        return f"{seconds:.0f} s"
    size, unit = next((each for each in ((1.0, "s"), (1e-3, "ms")) if seconds >= each[0]), (1e-6, "us"))
    return f"{seconds / size:.3g} {unit}"
