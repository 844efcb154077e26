"""The times of places and of the iterations of loops: their distributions, the slowest ones, and tables of these."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.failures.steps import Occurrence, StepsOf
from hostcallback.receiver.text import duration_text, text_table

ITERATION, PROGRAM = "iteration", "program"
"""The names of rows: all places in an iteration of a loop with several, and the whole program."""

BINS_PER_OCTAVE = 64  # a percentile is within 0.6 %

FEW_CALLS = 32
"""Of a program with at most that number of calls the slowest iterations are shown, if there are more of these."""

SHOWN_SLOWEST = 5
"""Slowest calls or iterations below a table, if there are at least `LISTED_FROM`."""

LISTED_FROM = 10

SHORTEST = 1e-9

ByDevice = Mapping[str, np.ndarray[Any, Any]]  # the seconds of a place; NaN where it did not run


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


class SlowPlace(NamedTuple):
    """A place that took far longer than usual.

    Attributes:
        place: its name.
        seconds: in this call or iteration; of several devices the mean.
        median: of all calls or iterations; 0 if it does not run in most of them.
    """

    place: str
    seconds: float
    median: float

    def __str__(self) -> str:
        """Says it: `mlp 5.1 ms (3.4 x)`."""
        return f"{self.place} {duration_text(self.seconds)} ({_ratio_text(self.seconds, self.median)})"


class SlowStep(NamedTuple):
    """One of the slowest calls of a program, or iterations of a loop.

    Attributes:
        which: `step 12`, or `call 12` where no step is known, or `call 3, iteration 40`, as `TimeRow.max_at`.
        step: of the call; None if it is not known, and of iterations.
        seconds: of the program, or of all places in the iteration together; of several devices the mean.
        median: of all calls or iterations.
        places: see `slow_places`.
    """

    which: str
    step: int | None
    seconds: float
    median: float
    places: list[SlowPlace]


def slow_places(seconds: Mapping[str, float], medians: Mapping[str, float], whole: float) -> list[SlowPlace]:
    """The places that took far longer than usual in a call or iteration, the one with the most time more first.

    Args:
        seconds: of each place.
        medians: of each place, in all calls or iterations.
        whole: the median of all places together.

    Returns:
        Up to three places, each a fifth above its median, and two percent of `whole` above it; without those of which
        half of the time more is that of a place in them.
    """
    more = {place: each - medians[place] for place, each in seconds.items()}
    found = [place for place in more if more[place] > max(0.2 * medians[place], 0.02 * whole)]

    def is_explained(outer: str) -> bool:
        return any(one.startswith(f"{outer}/") and more[one] >= more[outer] / 2 for one in found)

    found = sorted((place for place in found if not is_explained(place)), key=lambda place: -more[place])
    return [SlowPlace(place, seconds[place], medians[place]) for place in found[:3]]


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


@dataclass(slots=True, eq=False)
class _Step:
    """The step of a message, if it is known."""

    number: int | None
    sent: Occurrence | None


class _Which(NamedTuple):
    """Which one of the times of a place."""

    step: _Step
    call: int
    iterations: tuple[int, ...]

    def is_of_call(self, other: _Which) -> bool:
        """Whether both are of one call and iteration, as far as is known: devices may be in different steps."""
        return self[1:] == other[1:] and len({self.step.number, other.step.number} - {None}) < 2

    def text(self, calls: int) -> str:
        """Says it, of a place that was called that often."""
        parts = []
        if calls > 1:
            # A call with a loop may have a step for each iteration, and its message only the last one.
            knows_step = self.step.number is not None and not self.iterations
            parts.append(f"step {self.step.number}" if knows_step else f"call {self.call}")
        parts += [f"iteration {'/'.join(map(str, self.iterations))}"] if self.iterations else []
        return ", ".join(parts)


def bin_numbers(seconds: np.ndarray[Any, Any]) -> list[int]:
    """Where each of the times belongs; NaN nowhere."""
    if seconds.size == 1:  # most calls, and sixteen times as fast
        one = seconds.item()
        return [round(math.log2(max(one, SHORTEST)) * BINS_PER_OCTAVE)] if one >= 0 else []
    ran = seconds[~np.isnan(seconds)]
    found: list[int] = np.round(np.log2(np.maximum(ran, SHORTEST)) * BINS_PER_OCTAVE).astype(int).tolist()
    return found


def percentile(bins: Counter[int], percent: int) -> float:
    """A time that this part of the times does not exceed; NaN where there are none."""
    left = math.ceil(bins.total() * percent / 100)
    for number in sorted(bins):
        left -= bins[number]
        if left <= 0:
            return math.exp2(number / BINS_PER_OCTAVE)
    return math.nan


def _sum_and_bounds(seconds: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    if seconds.size == 1:  # it ran
        return (seconds.item(),) * 3
    ran = seconds[~np.isnan(seconds)]
    return float(ran.sum(dtype=np.float64)), float(ran.min()), float(ran.max())


class _Distribution:
    def __init__(self) -> None:
        self.total, self.count, self.calls = 0.0, 0, 0
        self.bins: Counter[int] = Counter()
        self.longest: tuple[float, _Which | None] = -math.inf, None
        self.shortest = math.inf

    def add(self, seconds: np.ndarray[Any, Any], step: _Step) -> None:
        """Adds the times of one call, by iteration; NaN where it did not run."""
        if bins := bin_numbers(seconds):
            total, least, most = _sum_and_bounds(seconds)
            self.total += total
            self.count += len(bins)
            self.shortest = min(self.shortest, least)
            self.bins.update(bins)
            if most > self.longest[0]:
                at = np.unravel_index(int(np.nanargmax(seconds)), seconds.shape)
                self.longest = most, _Which(step, self.calls, tuple(map(int, at)))
        self.calls += 1


_Parts = Mapping[str, ByDevice]
_Found = Mapping[str, Mapping[str, _Distribution]]


def _calls(known: Mapping[str, _Distribution], devices: Iterable[str]) -> int:
    return max((known[device].calls for device in devices if device in known), default=0)


class _Slowest:
    """The slowest calls, or iterations of a loop, with the times of the places in them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: list[tuple[float, _Which, dict[str, float]]] = []  # the slowest first
        self.sums: dict[str, Counter[int]] = {}  # of the places that run several times in one, by device

    def add(self, whole: ByDevice, parts: _Parts, which: Callable[[int], _Which], before: _Found) -> None:
        """Adds those of a message: the seconds of each by device and of the places in it, which one it is; `before`."""
        count = max((each.size for each in whole.values()), default=0)
        if not self.most or not count:
            return
        for place, by_device in parts.items():
            if place not in self.sums and any(each.size > count for each in by_device.values()):
                self.sums[place] = _bins_of(before.get(place, {}))  # so far it ran once in each
            if place in self.sums:
                sums = _means(by_device, count)
                self.sums[place].update(bin_numbers(sums[sums > 0]) * len(by_device))
        seconds = _means(whole, count)
        while (at := int(seconds.argmax())) >= 0 and seconds[at] > self._least():
            times = {place: _means(each, count).item(at) for place, each in parts.items()}
            self._keep(seconds.item(at), which(at), times)
            seconds[at] = 0.0

    def _least(self) -> float:
        return self.found[-1][0] if len(self.found) == self.most else 0.0

    def _keep(self, seconds: float, which: _Which, parts: dict[str, float]) -> None:
        # Devices may have a message each of one call.
        others = [one for one in self.found if not which.is_of_call(one[1])]
        mine = [one for one in self.found if which.is_of_call(one[1])] + [(seconds, which, parts)]
        others.append(max(mine, key=lambda one: one[0]))
        self.found = sorted(others, key=lambda one: -one[0])[: self.most]

    def steps(self, whole: Mapping[str, _Distribution], places: _Found) -> list[SlowStep]:
        """The slowest ones, the slowest first; `whole` has the times of all, and `places` those of each place."""
        calls, usual = _calls(whole, whole), percentile(_bins_of(whole), 50)
        medians = {place: self._median(place, _count(whole), places[place]) for place in places}
        return [
            SlowStep(which.text(calls) or f"call {which.call}", None if which.iterations else which.step.number,
                     seconds, usual, slow_places(parts, medians, usual))
            for seconds, which, parts in self.found
        ]  # fmt: skip

    def _median(self, place: str, count: int, by_device: Mapping[str, _Distribution]) -> float:
        bins = self.sums.get(place) or _bins_of(by_device)
        return percentile(bins, 50) if 2 * bins.total() > count * len(by_device) else 0.0


def _count(by_device: Mapping[str, _Distribution]) -> int:  # devices have as many of them each
    return max((one.count for one in by_device.values()), default=0)


def _bins_of(by_device: Mapping[str, _Distribution]) -> Counter[int]:
    return sum((one.bins for one in by_device.values()), Counter())


def _means(by_device: ByDevice, count: int) -> np.ndarray[Any, Any]:
    # The seconds of each call or iteration, shape (count,): of several devices the mean; those of inner loops added.
    sums = [
        each.ravel() if each.size == count else np.nansum(each.reshape(count, -1), axis=1)
        for each in by_device.values()
    ]
    found = sums[0] if len(sums) == 1 else np.mean(np.nan_to_num(sums), axis=0) if sums else np.zeros(count)
    return np.where(np.isnan(found), 0.0, found)


@dataclass(eq=False)
class _LoopTimes:
    depth: int
    slowest: _Slowest
    places: set[str] = field(default_factory=set)
    has_several: bool = False
    by_device: dict[str, _Distribution] = field(default_factory=dict)


def _add(known: dict[str, _Distribution], by_device: ByDevice, step: _Step) -> None:
    for device, times in by_device.items():
        (known.get(device) or known.setdefault(device, _Distribution())).add(times, step)


class Times:
    """The times of the places of one tap. Any thread."""

    def __init__(self, most_slowest: int = SHOWN_SLOWEST) -> None:
        """There are none yet; `most_slowest` of the slowest calls and iterations are kept, with the times of places."""
        self._lock = threading.Lock()  # protects what is below
        self._found: dict[str, dict[str, _Distribution]] = {}
        self._slowest = _Slowest(most_slowest)
        self._loops: list[_LoopTimes] = []
        self._is_new = False

    def add(
        self,
        seconds: Mapping[str, ByDevice],
        is_printed: bool = False,
        step: int | None = None,
        loops: Sequence[Loop] = (),
        sent: Occurrence | None = None,
    ) -> None:
        """Adds the times of one call.

        Args:
            seconds: by place and device, as from `TimeSink.seconds`.
            is_printed: whether `new_tables` has them.
            step: of the call, where it is known.
            loops: of the call, as from `TimeSink.loops`.
            sent: the message, for `find_steps`.
        """
        at = _Step(step, sent)
        with self._lock:
            if self._slowest.most:
                loops = loops or _only_loop(seconds)
                self._add_call(seconds, at)
            for place, times in seconds.items():
                _add(self._found.setdefault(place, {}), times, at)
            ran = [self._loop_of(loop) for loop in loops]
            for known, loop in zip(ran, loops, strict=True):
                _add_iterations(known, loop, seconds, at)
            for idle in self._loops:
                if idle not in ran and not idle.places.isdisjoint(seconds):
                    _add(idle.by_device, dict.fromkeys(idle.by_device, np.full((), np.nan)), at)
            self._is_new |= is_printed

    def _add_call(self, seconds: Mapping[str, ByDevice], step: _Step) -> None:
        if (whole := seconds.get(PROGRAM)) is not None:  # not in a message of a while loop
            call = _Which(step, _calls(self._found.get(PROGRAM, {}), whole), ())
            places = {place: each for place, each in seconds.items() if place != PROGRAM}
            self._slowest.add(whole, places, lambda at: call, self._found)

    def _loop_of(self, loop: Loop) -> _LoopTimes:
        # In one call some places of a loop may not run, and in the next one others.
        for known in self._loops:
            if known.depth == loop.depth and not known.places.isdisjoint(loop.places):
                return known
        self._loops.append(_LoopTimes(loop.depth, _Slowest(self._slowest.most)))
        return self._loops[-1]

    def find_steps(self, steps_of: StepsOf) -> None:
        """Looks for the steps of the calls that `rows` and `slowest` name."""
        with self._lock:
            slowest = [self._slowest, *(loop.slowest for loop in self._loops)]
            shown = [*self._found.values(), *(loop.by_device for loop in self._loops)]
            named: list[_Which | None] = [one[1] for each in slowest for one in each.found]
            named += [one.longest[1] for by_device in shown for one in by_device.values()]
            open_steps = [one.step for one in named if one and one.step.number is None and not one.iterations]
        unknown = {step.sent: step for step in open_steps if step.sent is not None}
        for sent, number in steps_of([*unknown]).items() if unknown else ():
            unknown[sent].number = number

    def rows(self) -> list[TimeRow]:
        """The rows of the table: places in the order of the program, loops of several places, and the program."""
        with self._lock:
            names = (ITERATION if n == 1 else f"{ITERATION}#{n}" for n in itertools.count(1))
            free = (name for name in names if name not in self._found)
            several = (loop for loop in self._loops if loop.has_several and self._is_innermost(loop))
            loops = dict(zip(free, (loop.by_device for loop in several), strict=False))
            shown = self._found | loops
            found = [_row(place, by_device) for place, by_device in shown.items()]
            totals = {place: sum(one.total for one in each.values()) for place, each in shown.items()}
        whole = totals.get(PROGRAM) or math.nan
        rows = [replace(row, share=totals[row.place] / whole) for row in found]
        return sorted(rows, key=lambda row: (row.place == PROGRAM, row.place in loops))

    def _is_innermost(self, loop: _LoopTimes) -> bool:
        # Of loops in each other that have the same places.
        return all(one.places != loop.places for one in self._loops if one.depth > loop.depth)

    def slowest(self, *, has_few: bool = False) -> list[SlowStep]:
        """The slowest calls, or iterations of the outermost loop if there are few calls; the slowest first.

        `has_few`: also if there are fewer than `LISTED_FROM`.
        """
        with self._lock:
            loops = [loop for loop in self._loops if self._is_innermost(loop)]
            loops.sort(key=lambda loop: (loop.depth, -sum(one.total for one in loop.by_device.values())))
            listed = [(self._slowest, self._found.get(PROGRAM, {}))]
            listed += [(loop.slowest, loop.by_device) for loop in loops]
            many = (each for each in listed if _count(each[1]) > FEW_CALLS)
            found, whole = next(many, None) or max(listed, key=lambda each: _count(each[1]))
            is_listed = has_few or _count(whole) >= LISTED_FROM
            return found.steps(whole, self._found) if is_listed else []

    def text(self, *, has_few: bool = False) -> str:
        """The table of the places, and below it that of `slowest`, if there are any."""
        return "\n\n".join(filter(None, (table(self.rows()), slowest_table(self.slowest(has_few=has_few)))))

    def bins(self) -> dict[str, Counter[int]]:
        """How often each place took about 2 ** (n / BINS_PER_OCTAVE) seconds, by n."""
        with self._lock:
            return {place: _bins_of(each) for place, each in self._found.items()}

    def take_new(self) -> bool:
        """Whether times were added since the last call."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
        return is_new


def _only_loop(seconds: Mapping[str, ByDevice]) -> list[Loop]:
    # The loop of the only place: `TimeSink.loops` has those of several.
    places = [place for place in seconds if place != PROGRAM]
    depth = max((each.ndim for place in places for each in seconds[place].values()), default=0)
    if len(places) != 1 or (not depth and PROGRAM in seconds):
        return []
    return [Loop(depth, set(places), dict(seconds[places[0]]), has_several=False)]


def _add_iterations(known: _LoopTimes, loop: Loop, seconds: Mapping[str, ByDevice], step: _Step) -> None:
    call = _calls(known.by_device, loop.seconds)
    shape = next((each.shape for each in loop.seconds.values()), ())

    def which(at: int) -> _Which:
        return _Which(step, call, tuple(map(int, np.unravel_index(at, shape))))

    known.slowest.add(loop.seconds, {place: seconds[place] for place in loop.places}, which, {})
    known.places.update(loop.places)
    known.has_several |= loop.has_several
    _add(known.by_device, loop.seconds, step)


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
    middles = [percentile(both.bins, percent) for percent in (50, 90, 99)]
    p50, p90, p99 = np.clip(middles, shortest, longest).tolist()
    at = "" if which is None else which.text(max(one.calls for one in by_device.values()))
    longest = math.nan if which is None else longest
    return TimeRow(place, both.count, mean, p50, p90, p99, longest, at, math.nan, slowest, spread)


def slowest_table(steps: Sequence[SlowStep]) -> str:
    """Returns the slowest calls or iterations as a text table; empty if there are none."""
    if not steps:
        return ""
    head = ("slowest", "time", "to median", "places far above their median")
    lines = []
    for one in steps:
        to_median, places = _ratio_text(one.seconds, one.median), ", ".join(map(str, one.places))
        lines.append((one.which, duration_text(one.seconds), to_median, places))
    return "\n".join(text_table(head, lines, left=(0, 3)))


def _ratio_text(seconds: float, median: float) -> str:
    if not median:
        return "seldom runs"
    ratio = seconds / median
    return f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.3g} x"


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
