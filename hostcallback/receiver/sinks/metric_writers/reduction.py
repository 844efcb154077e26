"""Reads the metrics in the messages of taps, and reduces them over steps, vmap lanes and devices to a record a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver.messages import NAME as STEP, Message, array_names, device_text
from hostcallback.receiver.sinks import batches, described_template
from hostcallback.receiver.sinks.metric_writers import lanes
from hostcallback.receiver.wire import pytree as tree, tap_descriptor
from hostcallback.receiver.wire.array_types import Array

SCALAR, HISTOGRAM, IMAGE, TEXT = "scalar", "histogram", "image", "text"
FORMS = (SCALAR, HISTOGRAM, IMAGE, TEXT)
REDUCTIONS = ("mean", "last", "max", "min", "sum", "histogram", "each")
"""The values of `reduce`; "each" keeps lanes and devices apart and takes the last step."""
DEFAULT_REDUCTION = "mean"
BINS = 64
NO_STEP = -(2**63)
"""The step of a record whose step is not known; no message has that step."""


@dataclass(slots=True)
class MetricRecord:
    """The metrics of one step, by name.

    Attributes:
        step: the step; `NO_STEP` where it is not known.
        time_ns: Unix time in nanoseconds at which the device emitted the last of them.
        scalars: numbers.
        histograms: the values of each histogram: one dimension, float64 or an integer dtype.
        images: shape (height, width, channels) with 1, 3 or 4 channels, uint8.
        texts: texts.
        bins: number of bins for each histogram, as the tap asked for.
        device: the device that sent them, where the records of each device stay apart; else empty.
    """

    step: int
    time_ns: int
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Array] = field(default_factory=dict)
    images: dict[str, Array] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    bins: dict[str, int] = field(default_factory=dict)
    device: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the record has no metric."""
        return not (self.scalars or self.histograms or self.images or self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays and texts."""
        arrays = sum(array.nbytes for arrays in (self.histograms, self.images) for array in arrays.values())
        return arrays + sum(map(len, self.texts.values()))


class RecordWriter(Protocol):
    """Writes records. All methods but `open` are called on the writer's own thread, and may raise and block.

    One that has a method `settle` as well is told a second after a record to write what need not wait any longer, and
    returns whether something still waits.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    def open(self) -> None:
        """Prepares to write, on the thread that enters the receiver."""

    def write(self, record: MetricRecord) -> None:
        """Writes a record. Steps need not increase."""

    def flush(self) -> None:
        """Writes everything that is buffered."""

    def close(self) -> None:
        """Releases what `open` took. A writer of the user stays open."""


class UnsupportedMetric(Exception):
    """A writer cannot hold a kind of metric; the text has `no` and the kind. It has written the rest of the record."""


class Metric(NamedTuple):
    """A metric of a tap.

    Attributes:
        name: its name.
        form: one of `FORMS`.
        arrays: indices of its arrays in a message: one, or those of a text's fields.
        reduce: one of `REDUCTIONS`.
        bins: number of bins of a histogram.
        template: of a text.
    """

    name: str
    form: str
    arrays: tuple[int, ...]
    reduce: str
    bins: int = BINS
    template: str = ""


class TapLayout:
    """Reads the messages of one tap.

    Attributes:
        key: what the tap is for users, equal for its variants under transformations.
        metrics: its metrics, by the order of their names.
        every: number of steps that one record covers.
    """

    def __init__(self, described: tap_descriptor.TapDescriptor) -> None:
        """Reads a tap's description, which may come from a file.

        Raises:
            ValueError: it does not describe metrics.
        """
        params = described.params
        self.key = described.name, described.source_line
        self.every = _number(params.get("every", 1), "every")
        self._described = described
        self._unflatten = tree.unflatten_with(described.tree)
        self._dims = batches.batchings_of(described.transforms)
        self._step = -1
        self.metrics: list[Metric] = []
        self._count = -1

    def _read(self, count: int) -> None:
        # The number of arrays is known from the first message.
        names = array_names(self._described.tap_kind, self._unflatten, count)
        self._count = count
        forms, reductions = (_dict(self._described.params.get(key, {})) for key in ("forms", "reduce"))
        if STEP in names:
            self._step = names.index(STEP)
        found: list[Metric] = []
        of_texts = {name for name, form in forms.items() if form[:1] == [TEXT]}
        for index, name in enumerate(names):
            if index == self._step or name.rpartition("/")[0] in of_texts:
                continue
            form, *rest = forms.get(name, [SCALAR])
            reduce = reductions.get(name, reductions.get("", DEFAULT_REDUCTION))
            if form not in FORMS or reduce not in REDUCTIONS:
                raise ValueError(
                    f"the metric {name!r} has the form {form!r:.80} and the reduction {reduce!r:.80}"
                )
            bins = _number(rest[0], "bins") if form == HISTOGRAM and rest else BINS
            found.append(Metric(name, form, (index,), reduce, bins))
        for name in of_texts:
            fields = [f"{name}/{place}" for place in range(len(names))]
            places = tuple(names.index(field) for field in fields if field in names)
            found.append(Metric(name, TEXT, places, "last", template=str(forms[name][1])))
        self.metrics = sorted(found)

    def take(self, message: Message) -> TakenMessages:
        """Returns the content of a message, or of a stack of them."""
        if self._count < 0:
            self._read(len(message.arrays))
        count = message.stacked or 1
        arrays: list[Array] = [
            array if message.stacked else array[np.newaxis] for array in map(np.asarray, message.arrays)
        ]
        values = [[self._lanes(arrays[place], place) for place in metric.arrays] for metric in self.metrics]
        if self._step < 0:
            return TakenMessages(count, None, values, {})
        of_lanes = self._lanes(arrays[self._step], self._step).reshape(count, -1).astype(np.int64)
        steps = of_lanes.max(axis=1)
        apart: dict[int, list[lanes.StepLanes]] = {}
        if of_lanes.shape[1] > 1:
            differ = of_lanes.min(axis=1) != steps
            for place in differ.nonzero()[0].tolist():
                if found := self._apart(message, arrays, of_lanes[place]):
                    apart[place] = found
        return TakenMessages(count, steps, values, apart)

    def _apart(self, message: Message, arrays: list[Array], steps: Array) -> list[lanes.StepLanes] | None:
        at = message.shard_index
        spans = [
            lanes.spans_of(array.shape[1:], self._dims_of(place), None if at is None else at[place])
            for place, array in enumerate(arrays)
        ]
        of_metrics = [spans[place] for metric in self.metrics for place in metric.arrays]
        return lanes.by_step(steps, spans[self._step], of_metrics)

    def _dims_of(self, place: int) -> lanes.Dims:
        return [of_arrays[place] for of_arrays in self._dims]

    def _lanes(self, array: Array, place: int) -> Array:
        return lanes.on_one_axis(array, self._dims_of(place))


class MessagePart(NamedTuple):
    """What the lanes of a message sent for one step.

    Attributes:
        step: the step.
        values: for each metric its arrays, each of shape (lanes, *shape of the metric).
        lanes: for each metric the numbers of the lanes of its first array, none if that has one lane only; None if all
            lanes sent the step.
    """

    step: int
    values: list[list[Array]]
    lanes: list[list[int]] | None


class TakenMessages(NamedTuple):
    """Consecutive messages of one tap and device.

    Attributes:
        size: number of messages.
        steps: int64, shape (count,), of each message the largest; None if the tap has no steps.
        values: for each metric its arrays, each of shape (count, lanes, *shape of the metric).
        apart: the lanes by step of the messages whose lanes send different steps, by the message's place. They count
            the arrays of all metrics.
    """

    size: int
    steps: Array | None
    values: Sequence[Sequence[Array]]
    apart: Mapping[int, Sequence[lanes.StepLanes]]

    def parts(self, place: int) -> Iterator[MessagePart]:
        """Yields what one message has for each step, in the order of the steps."""
        assert self.steps is not None
        values = [[array[place] for array in arrays] for arrays in self.values]
        if place not in self.apart:
            yield MessagePart(int(self.steps[place]), values, None)
            return
        for step, of_arrays in self.apart[place]:
            rest = iter(of_arrays)
            numbers = [[next(rest) for _ in arrays] for arrays in values]
            taken = [
                [array[of_array] for array, of_array in zip(arrays, of_metric, strict=True)]
                for arrays, of_metric in zip(values, numbers, strict=True)
            ]
            named = [
                of_metric[0].tolist() if of_metric and len(arrays[0]) > 1 else []
                for arrays, of_metric in zip(values, numbers, strict=True)
            ]
            yield MessagePart(step, taken, named)


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{what} is {str(value)[:80]}, expected a number from 1")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a map, got {str(value)[:80]}")
    return value


MAX_WINDOWS = 64
"""Number of steps, or groups of steps, that a tap keeps open while a device is behind."""

_REDUCE: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "last": lambda array, axis: array[:, -1],
}


class TapReduction:
    """The reduction of one tap's messages. Its caller holds a lock.

    A record covers `every` steps: those from a multiple of `every` to the next one. It is complete as soon as each
    device of the program has sent a step of a later one or the last step that belongs to it.
    """

    def __init__(self, layout: TapLayout, counts: Counter[str]) -> None:
        """`layout` reads the messages. `counts` has the number of messages per device, for taps without steps."""
        self._layout = layout
        self._windows: dict[int, _Window] = {}
        self._at: dict[str, int] = {}
        self._spread: dict[str, list[int]] = {}  # by device whose lanes are in several windows: their numbers
        self._counts = counts

    def take(self, message: Message, devices: int) -> list[MetricRecord]:
        """Returns the records that a message, or a stack of messages, completes.

        `devices`: how many of this process the program runs on.
        """
        device = device_text(message.device)
        taken = self._layout.take(message)
        if taken.steps is None:
            first = self._counts[device]
            taken = taken._replace(steps=np.arange(first, first + taken.size))
        self._counts[device] += taken.size
        if self._layout.every == 1 and devices <= 1 and not (self._at.keys() - {device}):
            self._at[device] = int(taken.steps[-1])  # type: ignore[index]
            return list(self._records(taken, device, message.time_ns))
        return self._reduce(taken, device, message.time_ns, devices)

    def finish(self, *, partial: bool) -> list[MetricRecord]:
        """Returns the records whose messages have all arrived; with `partial` those that lack steps, too."""
        newest = min([max(self._windows, default=0), *map(min, self._spread.values())])
        done = [n for n in sorted(self._windows) if partial or self._layout.every == 1 or n < newest]
        return [self._windows.pop(n).record(self._layout.metrics) for n in done]

    def _records(self, taken: TakenMessages, device: str, time_ns: int) -> Iterator[MetricRecord]:
        # Nothing is to be waited for: each message is a record for each of its steps, mostly one. Lanes are reduced for
        # all messages at once.
        assert taken.steps is not None
        names: list[str] = []
        columns: list[list[float]] = []
        others: list[tuple[Metric, Any]] = []
        for metric, arrays in zip(self._layout.metrics, taken.values, strict=True):
            if metric.form != SCALAR or metric.reduce == "histogram":
                others.append((metric, arrays))
                continue
            # Sums of low-precision values would lose most digits.
            values = arrays[0].astype(np.float64)
            if metric.reduce == "each" and values.shape[1] > 1:
                names += [f"{metric.name}/{lane}" for lane in range(values.shape[1])]
                columns += values.T.tolist()
            else:
                names.append(metric.name)
                columns.append(_REDUCE.get(metric.reduce, np.mean)(values, axis=1).tolist())
        rows = zip(*columns, strict=True) if columns else iter([()] * taken.size)
        for place, (step, row) in enumerate(zip(taken.steps.tolist(), rows, strict=True)):
            if place in taken.apart:
                for part in taken.parts(place):
                    window = _Window(self._layout.metrics)
                    window.add(part, time_ns, device)
                    yield window.record(self._layout.metrics)
                continue
            record = MetricRecord(step, time_ns, dict(zip(names, row, strict=True)))
            for metric, arrays in others:
                _set(record, metric, [array[place] for array in arrays])
            yield record

    def _reduce(self, taken: TakenMessages, device: str, time_ns: int, devices: int) -> list[MetricRecord]:
        every, found = self._layout.every, list[MetricRecord]()
        for place in range(taken.size):
            reached: list[int] = []
            for part in taken.parts(place):
                number = part.step // every
                window = self._windows.get(number)
                if window is None:
                    window = self._windows[number] = _Window(self._layout.metrics)
                window.add(part, time_ns, device)
                # The last step that a window covers ends it for these lanes.
                reached.append(number + (part.step % every == every - 1))
            # The lanes that are behind have steps to send that belong to windows of earlier numbers.
            self._at[device] = reached[0]
            self._spread.pop(device, None)
            if len({*reached}) > 1:
                self._spread[device] = [*{*reached}]
            most = MAX_WINDOWS + sum(map(len, self._spread.values()))
            if len(self._at) >= devices or len(self._windows) > most:
                found += self._complete(most)
        return found

    def _complete(self, most: int) -> list[MetricRecord]:
        passed = min(self._at.values())
        numbers = sorted(self._windows)
        # A device that has ended, or is far behind, must not keep all others' values in memory.
        count = max(sum(number < passed for number in numbers), len(numbers) - most)
        return [self._windows.pop(number).record(self._layout.metrics) for number in numbers[:count]]


class _Window:
    # The values of some steps of a tap, from all devices.

    def __init__(self, metrics: list[Metric]) -> None:
        self._step = -1
        self._time_ns = 0
        self._parts: list[dict[str, Any]] = [{} for _ in metrics]
        self._metrics = metrics

    def add(self, part: MessagePart, time_ns: int, device: str) -> None:
        self._step, self._time_ns = max(self._step, part.step), max(self._time_ns, time_ns)
        for place, (metric, parts, arrays) in enumerate(
            zip(self._metrics, self._parts, part.values, strict=True)
        ):
            if metric.form == SCALAR and metric.reduce == "each":
                values = arrays[0].astype(np.float64).tolist()
                if part.lanes is None:
                    parts[device] = dict(enumerate(values)) if len(values) > 1 else {-1: values[0]}
                else:  # the value of each lane's last step
                    numbers = part.lanes[place] or [-1]  # a metric of one lane has no number
                    parts[device] = parts.get(device, {}) | dict(zip(numbers, values, strict=True))
            elif metric.form == SCALAR and metric.reduce != "last":
                flat = arrays[0].astype(np.float64).reshape(-1)
                parts[""] = _joined(metric.reduce, parts.get(""), flat)
            elif metric.form == HISTOGRAM:
                parts.setdefault("", []).append(arrays[0])
            else:
                parts[device] = arrays

    def record(self, metrics: list[Metric]) -> MetricRecord:
        record = MetricRecord(self._step, self._time_ns)
        for metric, parts in zip(metrics, self._parts, strict=True):
            if metric.form == HISTOGRAM:
                _set(record, metric, [np.concatenate([part.reshape(-1) for part in parts[""]])])
            elif "" in parts:
                _finish(record, metric, parts[""])
            elif metric.reduce == "each":
                for device in sorted(parts, key=_device_order):
                    name = f"{metric.name}/{device}" if len(parts) > 1 else metric.name
                    if metric.form == SCALAR:
                        record.scalars |= {_of_lane(name, n): v for n, v in sorted(parts[device].items())}
                    else:
                        _set(record, metric._replace(name=name), parts[device])
            else:
                _set(record, metric, parts[max(parts, key=_device_order)])
        return record


def _of_lane(name: str, number: int) -> str:
    return name if number < 0 else f"{name}/{number}"


def _device_order(device: str) -> tuple[int, str]:
    return len(device), device  # cpu:9 before cpu:10


def _joined(reduce: str, so_far: Any, values: Array) -> Any:
    # What is kept of a scalar's values: (sum, count), an extreme, or a list of them.
    if reduce == "histogram":
        kept: list[Array] = [] if so_far is None else so_far
        kept.append(values)
        return kept
    if reduce in ("mean", "sum"):
        total, count = so_far or (0.0, 0)
        return total + float(values.sum()), count + values.size
    extreme = np.max if reduce == "max" else np.min
    return extreme(values) if so_far is None else extreme([so_far, extreme(values)])


def _finish(record: MetricRecord, metric: Metric, kept: Any) -> None:
    if metric.reduce == "histogram":
        record.histograms[metric.name], record.bins[metric.name] = np.concatenate(kept), metric.bins
    elif metric.reduce == "mean":
        record.scalars[metric.name] = kept[0] / kept[1] if kept[1] else float("nan")
    else:
        record.scalars[metric.name] = float(kept[0] if metric.reduce == "sum" else kept)


def _set(record: MetricRecord, metric: Metric, arrays: list[Array]) -> None:
    # Sets a metric from the arrays of one message, each of shape (lanes, *shape).
    name = metric.name
    if metric.form == TEXT:
        fields = [array[-1] for array in arrays]
        record.texts[name] = described_template.fill(metric.template, fields, {})
    elif metric.form == IMAGE:
        record.images[name] = _pixels(arrays[0][-1])
    elif metric.form == HISTOGRAM or metric.reduce == "histogram":
        values = arrays[0].reshape(-1)
        record.histograms[name] = values if values.dtype.kind in "iu" else values.astype(np.float64)
        record.bins[name] = metric.bins
    else:
        lanes = arrays[0].astype(np.float64)
        if metric.reduce == "each" and len(lanes) > 1:
            record.scalars.update({f"{name}/{lane}": value for lane, value in enumerate(lanes.tolist())})
        else:
            record.scalars[name] = float(
                _REDUCE.get(metric.reduce, _REDUCE["last"])(lanes[np.newaxis], axis=1)[0]
            )


def _pixels(array: Array) -> Array:
    # uint8, shape (height, width, channels). Floating-point pixels are from 0 to 1, and clipped to that.
    if array.ndim == 2:
        array = array[..., np.newaxis]
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind in "iu":
        return np.clip(array, 0, 255).astype(np.uint8)
    unit = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return np.rint(np.clip(unit, 0, 1) * 255).astype(np.uint8)
