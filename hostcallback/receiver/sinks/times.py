"""The times of places (`observe(what="time")`): their messages, their distributions, and the table of these."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages import Message, device_text
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.text import text_table
from hostcallback.receiver.wire.pytree import unflatten_with
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

SECONDS, START = "seconds", "start"
"""What a message has of each place: float32 seconds, and uint32 stamps (Unix nanoseconds, the lower half first). The
last axis of the seconds has the segments of the place in the program; those before are `axes` in the tap's params."""

ITERATION, DEVICE = "iteration", "device"
PROGRAM = "program"
"""The name of the place that is the whole program."""

BINS_PER_OCTAVE = 64  # a percentile is within 0.6 %


class Segment(NamedTuple):
    """One stretch of time of a place.

    Attributes:
        place: its name.
        start_ns: Unix time.
        seconds: its length.
        device: in a shard_map, the index of the device, such as `[0]`; else empty.
        iterations: of the loops around it, outermost first.
    """

    place: str
    start_ns: int
    seconds: float
    device: str
    iterations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimeRow:
    """The times of a place; seconds.

    Attributes:
        place: its name; `program` is the whole program.
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

    def add(self, seconds: np.ndarray[Any, Any], step: int | None) -> None:
        """Adds the times of one call, by iteration; NaN where it did not run."""
        ran = seconds[~np.isnan(seconds)]
        self.total += float(ran.sum(dtype=np.float64))
        self.count += ran.size
        self.bins.update(np.round(np.log2(np.maximum(ran, 1e-9)) * BINS_PER_OCTAVE).astype(int).tolist())
        if ran.size and (most := float(ran.max())) > self.longest[0]:
            at = np.unravel_index(int(np.nanargmax(seconds)), seconds.shape)
            self.longest = most, _Which(step, self.calls, tuple(map(int, at)))
        self.calls += 1

    def percentile(self, percent: int) -> float:
        left = math.ceil(self.count * percent / 100)
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                return math.exp2(number / BINS_PER_OCTAVE)
        return math.nan


class Times:
    """The times of the places of one tap. Any thread."""

    def __init__(self) -> None:
        """There are none yet."""
        self._lock = threading.Lock()  # protects what is below
        self._found: dict[str, dict[str, _Distribution]] = {}
        self._is_new = False

    def add(
        self,
        seconds: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
        is_printed: bool = False,
        step: int | None = None,
    ) -> None:
        """Adds the times of one call.

        Args:
            seconds: by place and device, as from `TimeSink.seconds`.
            is_printed: whether `new_tables` has them.
            step: of the call, where it is known.
        """
        with self._lock:
            for place, by_device in seconds.items():
                known = self._found.setdefault(place, {})
                for device, times in by_device.items():
                    known.setdefault(device, _Distribution()).add(times, step)
            self._is_new |= is_printed

    def rows(self) -> list[TimeRow]:
        """The rows of the table, in the order of the program, and the program last."""
        with self._lock:
            found = [_row(place, by_device) for place, by_device in self._found.items()]
            totals = {place: sum(one.total for one in each.values()) for place, each in self._found.items()}
        whole = totals.get(PROGRAM) or math.nan
        rows = [replace(row, share=totals[row.place] / whole) for row in found]
        return sorted(rows, key=lambda row: row.place == PROGRAM)

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
    p50, p90, p99 = (both.percentile(percent) for percent in (50, 90, 99))
    longest, which = max((one.longest for one in by_device.values()), key=lambda one: one[0])
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


def first_device(message: Message) -> int:
    """The index of the first device that a message has times of: logs have a message of each device."""
    return max((part.start or 0 for place in message.shard_index or () for part in place or ()), default=0)


def _device(index: Sequence[int], first: int) -> str:
    # The name of a device of several, by its index on the axes of devices.
    return f"[{index[0] + first}]" if len(index) == 1 else f"[{','.join(map(str, index))}]"


def as_measured(seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Seconds with NaN, as where a place did not run, for what no clock measures: a log may be foreign."""
    return np.where((seconds >= 0) & (seconds < np.inf), seconds, np.float32(np.nan))


def runs_by_device(
    seconds: np.ndarray[Any, Any], axes: Sequence[str], device: str, first: int = 0
) -> dict[str, np.ndarray[Any, Any]]:
    """The seconds of a place by device: its index in the program, such as `[0]`, or else `device`.

    Args:
        seconds: float32, shape (messages, *axes, segments).
        axes: of the place.
        device: that of the messages.
        first: see `first_device`.

    Returns:
        Arrays of shape (messages, iterations); NaN where it did not run.
    """
    whole = as_measured(seconds).sum(axis=-1)
    where = [i + 1 for i, axis in enumerate(axes) if axis == DEVICE]
    moved = np.moveaxis(whole, where, range(len(where)))
    return {
        _device(index, first) if index else device: moved[index].reshape(len(seconds), -1)
        for index in np.ndindex(moved.shape[: len(where)])
    }


class TimeSink:
    """Takes the messages of one tap of times."""

    def __init__(self, params: Mapping[str, Any], unflatten: Unflatten, is_printed: bool = True) -> None:
        """Makes the sink; `is_printed`: whether a table is printed at the end.

        Raises:
            KeyError: a parameter is missing.
            ValueError: it has another value.
        """
        self._axes: dict[str, list[str]] = params["axes"]
        if not isinstance(self._axes, dict) or any(
            not isinstance(axes, list) or not set(map(str, axes)) <= {ITERATION, DEVICE}
            for axes in self._axes.values()
        ):
            raise ValueError(f"the axes of times are {str(self._axes)[:80]!r}")
        self._unflatten = unflatten
        self._is_printed = is_printed

    @classmethod
    def of(cls, described: TapDescriptor) -> TimeSink:
        """The sink of a described tap."""
        return cls(described.params, unflatten_with(described.tree))

    def __call__(self, message: Message) -> None:
        """Adds the times to those of the tap."""
        times = times_by_tap.setdefault(message.consumer.name, Times())
        times.add(self.seconds(message), self._is_printed)

    def seconds(self, message: Message) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """The seconds of a message by place and device, with an axis for each loop; NaN for what did not run."""
        found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        for place, axes, times in self.places(message):
            of_one, first = times[SECONDS][np.newaxis], first_device(message)
            runs = runs_by_device(of_one, axes, device_text(message.device), first)
            lengths = [n for n, axis in zip(times[SECONDS].shape, axes, strict=False) if axis == ITERATION]
            found[place] = {device: run.reshape(lengths) for device, run in runs.items()}
        return found

    def segments(self, message: Message) -> Iterator[Segment]:
        """The segments of the places of a message, for traces."""
        for place, axes, times in self.places(message):
            stamps = np.ascontiguousarray(times[START]).view(np.uint64)[..., 0]
            for index in np.ndindex(stamps.shape):
                if not math.isnan(seconds := float(times[SECONDS][index])):
                    where = [index[i] for i, axis in enumerate(axes) if axis == DEVICE]
                    device = _device(where, first_device(message)) if where else ""
                    inner = tuple(index[i] for i, axis in enumerate(axes) if axis == ITERATION)
                    yield Segment(place, int(stamps[index]), seconds, device, inner)

    def values(self, message: Message) -> dict[str, dict[str, Any]]:
        """What a user's function gets: of each place `seconds`, and `start_ns` as int64."""
        return {
            place: {
                SECONDS: times[SECONDS].sum(axis=-1),
                "start_ns": np.ascontiguousarray(times[START]).view(np.int64)[..., 0, 0],
            }
            for place, _, times in self.places(message)
        }

    def texts(self, message: Message) -> list[str]:
        """The times of a message as one text: `layers/0 1.25 ms, layers/1 1.3 ms`."""
        parts = []
        for place, by_device in self.seconds(message).items():
            means = [float(np.nanmean(times)) for times in by_device.values() if not np.isnan(times).all()]
            parts.append(f"{place} {duration_text(sum(means) / len(means))}" if means else f"{place} -")
        return [", ".join(parts)]

    def places(self, message: Message) -> Iterator[tuple[str, list[str], dict[str, np.ndarray[Any, Any]]]]:
        """The places of a message: their names, the axes of their times, and these by `SECONDS` and `START`.

        Raises:
            ValueError: the message has other values.
        """
        value = self._unflatten(message.arrays)
        for place, axes in self._axes.items():
            try:
                times = {part: np.asarray(value[place][part]) for part in (SECONDS, START)}
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(f"a message of times has no times of {place!r}") from error
            shape = times[SECONDS].shape
            fits = len(shape) == len(axes) + 1 and times[START].shape == (*shape, 2)
            if not fits or times[SECONDS].dtype != np.float32 or times[START].dtype != np.uint32:
                raise ValueError(f"a message of times has other arrays of {place!r} than seconds and stamps")
            yield place, axes, times
