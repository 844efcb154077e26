"""The messages of the times of places (`observe(what="time")`): what they have of each place and each loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.failures.steps import Occurrence, StepsOf
from hostcallback.receiver.messages import Message, device_text
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.sinks.time_rows import ITERATION, PROGRAM, Loop, Times
from hostcallback.receiver.text import duration_text
from hostcallback.receiver.wire.pytree import unflatten_with
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

SECONDS, START = "seconds", "start"
"""What a message has of each place: float32 seconds, and uint32 stamps (Unix nanoseconds, the lower half first). The
last axis of the seconds has the segments of the place in the program; those before are `axes` in the tap's params."""

DEVICE = "device"
"""An axis of the times of a place; the other kind is `ITERATION`."""

ROUNDING = 1e-5  # of float32 seconds that are added up

Place = tuple[str, list[str], dict[str, np.ndarray[Any, Any]]]
"""What a message has of a place: its name, the axes of its times, and these by `SECONDS` and `START`."""


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


def first_device(message: Message) -> int:
    """The index of the first device that a message has times of: logs have a message of each device."""
    return max((part.start or 0 for place in message.shard_index or () for part in place or ()), default=0)


def _device(index: Sequence[int], first: int) -> str:
    # The name of a device of several, by its index on the axes of devices.
    return f"[{index[0] + first}]" if len(index) == 1 else f"[{','.join(map(str, index))}]"


def as_measured(seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Seconds with NaN, as where a place did not run, for what no clock measures: a log may be foreign."""
    if seconds.size == 1:  # most messages, and a fifth of the time
        return seconds if 0 <= seconds.item() < math.inf else np.full_like(seconds, np.nan)
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
    measured = as_measured(seconds)
    whole = measured[..., 0] if measured.shape[-1] == 1 else measured.sum(axis=-1)
    where = [i + 1 for i, axis in enumerate(axes) if axis == DEVICE]
    if not where:
        return {device: whole.reshape(len(seconds), -1)}
    moved = np.moveaxis(whole, where, range(len(where)))
    return {
        _device(index, first): moved[index].reshape(len(seconds), -1)
        for index in np.ndindex(moved.shape[: len(where)])
    }


class _Stretches(NamedTuple):
    """When a place ran, in float64 nanoseconds; arrays of shape (*devices, *loops, segments), NaN where it did not."""

    devices: int  # the number of axes
    begins: np.ndarray[Any, Any]  # since the message
    lengths: np.ndarray[Any, Any]

    def iterations(self, depth: int) -> tuple[int, ...]:
        """The number of devices and of iterations on each axis, of that many loops."""
        return tuple(map(int, self.begins.shape[: self.devices + depth]))

    def flat(self, depth: int) -> _Stretches:
        """With one axis of devices and one of the iterations of that many loops. Inner iterations become segments."""
        shape = self.iterations(depth)
        of_device = math.prod(shape[self.devices :])
        flat = (each.reshape(math.prod(shape[: self.devices]), of_device, -1) for each in self[1:])
        return _Stretches(1, *flat)

    def is_in_loop_of(self, other: _Stretches) -> bool:
        """Whether on the first device each iteration of one is over before the next one of the other. Both are flat."""
        one, two = (np.fmin.reduce(each.begins[0], axis=-1) for each in (self, other))
        order = np.argsort(two, kind="stable")
        one, two = one[order], two[order]
        return not (np.any(one[:-1] > two[1:]) or np.any(two[:-1] > one[1:]))


def _stretches(places: Iterable[Place], origin_ns: int) -> dict[str, _Stretches]:
    alike: dict[Any, list[tuple[str, dict[str, np.ndarray[Any, Any]]]]] = {}
    for place, axes, times in places:
        if place != PROGRAM:
            alike.setdefault((tuple(axes), times[SECONDS].shape), []).append((place, times))
    found = {}
    for (axes, _), group in alike.items():
        lengths = as_measured(np.stack([times[SECONDS] for _, times in group])).astype(np.float64) * 1e9
        stamps = np.stack([times[START] for _, times in group]).view(np.int64)[..., 0]
        begins = np.where(np.isnan(lengths), np.nan, (stamps - np.int64(origin_ns)).astype(np.float64))
        where = [i + 1 for i, axis in enumerate(axes) if axis == DEVICE]
        moved = [np.moveaxis(each, where, range(1, 1 + len(where))) for each in (begins, lengths)]
        for (place, _), *of_place in zip(group, *moved, strict=True):
            found[place] = _Stretches(len(where), *of_place)
    return found


def _sum(lengths: np.ndarray[Any, Any]) -> float:
    return max(0.0, lengths.item()) if lengths.size == 1 else float(np.nansum(lengths))  # 0 for NaN


def _together(found: Sequence[_Stretches]) -> np.ndarray[Any, Any]:
    """The seconds in which one of the places ran, by device and iteration; they are flat."""
    begins, lengths = (np.concatenate(each, axis=-1) for each in list(zip(*found, strict=True))[1:])
    order = np.argsort(begins, axis=-1)  # what did not run is last
    begins = np.take_along_axis(begins, order, -1)
    ends = begins + np.take_along_axis(lengths, order, -1)
    before = np.roll(np.maximum.accumulate(ends, axis=-1), 1, -1)
    before[..., 0] = begins[..., 0]
    seconds = np.fmax(ends - np.maximum(begins, before), 0).sum(axis=-1) / 1e9
    return np.where(np.isnan(begins[..., 0]), np.nan, seconds)


def _in_loops(places: Mapping[str, _Stretches], depth: int) -> list[dict[str, _Stretches]]:
    # The places that ran, flat, by the loop of that depth that they are in.
    found: dict[Any, list[dict[str, _Stretches]]] = {}
    for place, one in places.items():
        if one.begins.ndim <= one.devices + depth or np.isnan(one.lengths).all():
            continue
        flat, iterations = one.flat(depth), one.iterations(depth)
        alike = found.setdefault((one.devices, iterations), [])
        for loop in alike:
            if not depth or flat.is_in_loop_of(next(iter(loop.values()))):
                loop[place] = flat
                break
        else:
            alike.append({place: flat})
    return [loop for alike in found.values() for loop in alike]


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
        inner = [axes for place, axes in self._axes.items() if place != PROGRAM]
        self._has_loops = len(inner) > 1 and (
            PROGRAM not in self._axes or any(ITERATION in axes for axes in inner)
        )
        self._unflatten = unflatten
        self._is_printed = is_printed

    @classmethod
    def of(cls, described: TapDescriptor) -> TimeSink:
        """The sink of a described tap."""
        return cls(described.params, unflatten_with(described.tree))

    def __call__(self, message: Message) -> None:
        """Adds the times to those of the tap."""
        times = times_by_tap.setdefault(message.consumer.name, Times())
        sent = Occurrence(device_text(message.device), message.seq, message.time_ns, message.run_id)
        times.add(self.seconds(message), self._is_printed, loops=self.loops(message), sent=sent)

    def seconds(self, message: Message) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """The seconds of a message by place and device, with an axis for each loop; NaN for what did not run."""
        found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        for place, axes, times in self.places(message):
            of_one, first = times[SECONDS][np.newaxis], first_device(message)
            runs = runs_by_device(of_one, axes, device_text(message.device), first)
            lengths = [n for n, axis in zip(times[SECONDS].shape, axes, strict=False) if axis == ITERATION]
            found[place] = {device: run.reshape(lengths) for device, run in runs.items()}
        return found

    def loops(self, message: Message) -> list[Loop]:
        """The loops in which a place ran, those around others first. None where there can be no loop of several."""
        if not self._has_loops:
            return []
        places = _stretches(self.places(message), message.time_ns)
        deepest = max((one.begins.ndim - one.devices - 1 for one in places.values()), default=0)
        depths = range(PROGRAM in self._axes, deepest + 1)
        return [
            self._loop(loop, depth, places[next(iter(loop))], message)
            for depth in depths
            for loop in _in_loops(places, depth)
        ]

    @staticmethod
    def _loop(loop: Mapping[str, _Stretches], depth: int, first: _Stretches, message: Message) -> Loop:
        together = _together([*loop.values()])
        most = max(_sum(one.lengths) for one in loop.values()) / 1e9
        shape = first.iterations(depth)
        devices = [
            _device(index, first_device(message)) if index else device_text(message.device)
            for index in np.ndindex(shape[: first.devices])
        ]
        seconds = {
            device: of_one.reshape(shape[first.devices :])
            for device, of_one in zip(devices, together, strict=True)
        }
        return Loop(depth, set(loop), seconds, _sum(together) > most * (1 + ROUNDING))

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

    def places(self, message: Message) -> Iterator[Place]:
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


times_by_tap: dict[str, Times] = {}
"""The times that this process was sent, by the name of the tap. Guarded by Python's own lock."""


def new_tables(name: str | None, steps_of: StepsOf) -> list[str]:
    """Returns the tables of taps, or of one, that had times since the last call. `steps_of`: see `Times.find_steps`."""
    found = [times for tap, times in list(times_by_tap.items()) if name in (None, tap)]
    for times in found:
        times.find_steps(steps_of)
    return [times.text() for times in found if times.take_new()]
