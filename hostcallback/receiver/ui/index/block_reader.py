"""Splits blocks of messages by tap and leaf: buckets of scalars, and counts of all other leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.errors import WireError
from hostcallback.receiver.sinks.batches import LaneMask
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.metric_writers.reduction import SCALAR, TEXT
from hostcallback.receiver.sinks.times import DEVICE, SECONDS, first_device, runs_by_device
from hostcallback.receiver.taplog.columns.column_batches import Column, Layouts, array_views
from hostcallback.receiver.taplog.columns.tables import kept_columns
from hostcallback.receiver.taplog.format.block import FrameBlock, alike_groups
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, MessageDecoder
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.ui.index import buckets
from hostcallback.receiver.ui.index.taps import LANES, Tap, TapTable, kind_of
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.decoder import Decoder, Plan
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import METRICS, TIME, TapDescriptor

_TRUNCATED = np.uint64(int(Flags.TRUNCATED))

MAX_CONSUMERS = 65_536
"""Taps of which the leaves of a layout are remembered."""

MAX_KNOWN = 4096
"""Layouts of which the leaves are remembered."""

Leaves = list[tuple[int, Tap, Sequence[str]]]
"""The shown leaves of a message: index of the array, the row, and of a place that is timed the axes of its seconds."""


class Taker(Protocol):
    """What takes the parts of a block."""

    def scalar(self, tap: Tap, part: ScalarPart) -> None:
        """Takes messages of a scalar."""

    def other(self, tap: Tap, count: int) -> None:
        """Takes the number of messages of a leaf that is not a scalar."""

    def times(self, tap: Tap, part: ScalarPart, by_device: dict[str, Array]) -> None:
        """Takes messages of a place that is timed: the seconds of each call, and of each of its runs by device."""

    def check(self, run: Stretch, described: TapDescriptor, places: Array) -> None:
        """Takes the failures of a check: their places in the run's block."""


class ScalarPart(NamedTuple):
    """Messages of a scalar.

    Attributes:
        rows: as buckets.
        values: see `buckets.of_messages`.
        steps: see there.
        times: see there.
        has_steps: whether all of them, and of the messages around them, have a step.
        is_finite: whether all these values are finite.
    """

    rows: Array
    values: Array
    steps: Array
    times: Array
    has_steps: bool
    is_finite: bool


class _Group(NamedTuple):
    # Messages of one layout, those of a tap next to each other.
    views: Sequence[Array]
    shapes: tuple[Any, ...]
    ids: Array
    starts: Array
    steps: Array
    times: Array
    device: str


class BlockReader:
    """Reads blocks, and remembers the leaves of taps. One thread."""

    def __init__(self, taps: TapTable) -> None:
        """`taps` gets the rows of new leaves."""
        self._taps = taps
        self._layouts = Layouts()
        self._decoder = Decoder()
        self._runs = MessageDecoder()
        self._leaves: dict[Any, dict[int, Leaves]] = {}
        self._plain: dict[
            str, set[int]
        ] = {}  # taps of a process whose messages are read together, and no checks

    def is_plain(self, run: Stretch) -> bool:
        """Whether the messages of a run that was read are read together, and none is of a check."""
        return self._plain[run.writer.process].issuperset(run.block.consumers) and len(run.block.alike) == 1

    def read(self, run: Stretch, run_name: str, taker: Taker, *, per_bucket: int = buckets.MESSAGES) -> None:
        """Hands the parts of a run, which has to be a whole block, to `taker`."""
        block = run.block
        single = (block.flags & _TRUNCATED) != 0
        left = np.ones(len(block), np.bool_)
        plain = self._plain.setdefault(run.writer.process, set())
        for consumer_id in block.consumers:
            if consumer_id in plain:
                continue
            described = run.described.get(consumer_id)
            in_parts = described is not None and (
                described.shards is not None or LaneMask.of(described.transforms) is not None
            )
            if consumer_id in (WHOLE_ID, SHARDS_ID) or in_parts:
                single |= block.consumer_ids == np.uint64(consumer_id)
            elif described is not None and described.tap_kind.is_check:
                mine = block.consumer_ids == np.uint64(consumer_id)
                taker.check(run, described, np.flatnonzero(mine))
                left &= ~mine
            elif described is not None and len(plain) < MAX_CONSUMERS:
                plain.add(consumer_id)
        for places in alike_groups(block, np.flatnonzero(left & ~single)):
            if not self._alike(run, run_name, places, taker, per_bucket):
                single[places] = True
        for place in np.flatnonzero(left & single).tolist():
            for logged in self._runs.messages(run._replace(start=place, stop=place + 1)):
                if not isinstance(logged, Damage):
                    self._one(run, run_name, logged, place, taker)

    def _alike(self, run: Stretch, run_name: str, places: Array, taker: Taker, per_bucket: int) -> bool:
        # Returns False if these messages have to be decoded one by one.
        block = run.block
        plan = self._plan(block, places)
        if plan is None:
            return False
        group = self._group(run, places, plan)
        known = self._known(run, run_name, group.shapes)
        stops = [*group.starts[1:].tolist(), len(group.ids)]
        slices = []
        for start, stop in zip(group.starts.tolist(), stops, strict=True):
            consumer_id = int(group.ids[start])
            leaves = known.get(consumer_id)
            if leaves is None:
                described = run.described.get(consumer_id)
                columns, _ = self._layouts.of(described, group.shapes)
                leaves = self._new_leaves(known, run_name, described, columns, group.views, start)
            slices.append((start, stop, leaves))
        self._deliver(group, slices, taker, per_bucket)
        return True

    def _deliver(
        self, group: _Group, slices: list[tuple[int, int, Leaves]], taker: Taker, per_bucket: int
    ) -> None:
        count = len(group.ids)
        first, bounds = np.arange(count), [*group.starts.tolist(), count]
        if per_bucket > 1:
            inside = first - np.repeat(group.starts, np.diff(bounds))
            first = np.flatnonzero(inside % per_bucket == 0)
            bounds = np.searchsorted(first, bounds).tolist()
        made: dict[int, tuple[Array, Array, bool]] = {}
        has_steps = not (group.steps == NO_STEP).any()
        for number, (start, stop, leaves) in enumerate(slices):
            part = slice(start, stop)
            for index, tap, axes in leaves:
                if tap.kind == "time":
                    starts = first[bounds[number] : bounds[number + 1]] - start
                    runs = runs_by_device(group.views[index][part], axes, group.device)
                    taker.times(
                        tap, _of_calls(runs, group.steps[part], group.times[part], starts, has_steps), runs
                    )
                    continue
                if tap.kind != "scalar":
                    taker.other(tap, stop - start)
                    continue
                if index not in made:
                    values = buckets.real_values(group.views[index].reshape(count, -1))
                    rows = buckets.of_messages(values, group.steps, group.times, first)
                    made[index] = values, rows, bool(np.isfinite(values).all())
                values, rows, is_finite = made[index]
                mine = ScalarPart(
                    rows[bounds[number] : bounds[number + 1]], values[part], group.steps[part],
                    group.times[part], has_steps, is_finite,
                )  # fmt: skip
                taker.scalar(tap, mine)

    def _plan(self, block: FrameBlock, places: Array) -> Plan | None:
        try:
            plan = self._decoder.plan(block.data, int(block.offsets[places[0]]))
        except WireError:
            return None
        fits = plan.stackable and plan.payload_bytes == int(block.payload_bytes[places[0]])
        return plan if fits else None

    def _group(self, run: Stretch, places: Array, plan: Plan) -> _Group:
        block = run.block
        ids = block.consumer_ids[places]
        if (ids == ids[0]).all():
            starts = np.zeros(1, np.int64)
        else:
            order = np.argsort(ids, kind="stable")
            places, ids = places[order], ids[order]
            starts = np.append(0, np.flatnonzero(ids[1:] != ids[:-1]) + 1)
        shapes = tuple((shape, dtype) for shape, dtype, _, _ in plan.entries)
        steps = run.steps[places].astype(np.float64)
        return _Group(
            array_views(block, places, plan),
            shapes,
            ids,
            starts,
            steps,
            block.times_ns[places] / 1e9,
            run.device,
        )

    def _known(self, run: Stretch, run_name: str, shapes: tuple[Any, ...]) -> dict[int, Leaves]:
        # The leaves of the taps that were met with arrays of these shapes.
        if len(self._leaves) > MAX_KNOWN:
            self._leaves.clear()
        return self._leaves.setdefault((run.writer.process, run_name, shapes), {})

    def _new_leaves(
        self,
        known: dict[int, Leaves],
        run_name: str,
        described: TapDescriptor | None,
        columns: Sequence[Column],
        views: Sequence[Array],
        start: int,
    ) -> Leaves:
        # The shown leaves of a tap: its text, and what is no argument of a text, and no step. `views` has its arrays,
        # the first of them at `start`.
        if described is None:
            return []
        found: list[tuple[int, Tap | None, Sequence[str]]] = []
        if has_texts(described):
            found.append((-1, self._taps.of(run_name, described.name, "", "text", described.source_line), ()))
        if described.tap_kind is TIME:
            found += self._places(run_name, described, columns)
        is_metric = described.tap_kind is METRICS
        for place in kept_columns(columns) or (() if found else range(len(columns))):
            form = form_of(described, columns[place].name)
            if form is not None:
                kind = kind_of(form, columns[place], views[place][start])
                key = run_name, described.name, columns[place].name, kind, described.source_line
                is_complex = columns[place].dtype.kind == "c"
                found.append((place, self._taps.of(*key, is_metric=is_metric, is_complex=is_complex), ()))
        leaves = [(place, tap, axes) for place, tap, axes in found if tap is not None]
        if len(known) < MAX_CONSUMERS:
            known[described.consumer_id] = leaves
        return leaves

    def _places(
        self, run_name: str, described: TapDescriptor, columns: Sequence[Column]
    ) -> Iterator[tuple[int, Tap | None, Sequence[str]]]:
        # The seconds of the places that are timed, in the order of the program.
        shapes = {column.name: (number, len(column.shape)) for number, column in enumerate(columns)}
        axes_of = described.params.get("axes")
        for place, axes in axes_of.items() if isinstance(axes_of, dict) else ():
            number, rank = shapes.get(f"{place}/{SECONDS}", (0, 0))
            if not isinstance(axes, list) or rank != len(axes) + 1 or columns[number].dtype != np.float32:
                continue
            shape = columns[number].shape
            devices = math.prod(size for axis, size in zip(axes, shape, strict=False) if axis == DEVICE)
            if 0 not in shape and devices <= limits.DEVICES:
                tap = self._taps.of(run_name, described.name, str(place), "time", described.source_line)
                yield number, tap, axes

    def _one(self, run: Stretch, run_name: str, logged: LoggedMessage, place: int, taker: Taker) -> None:
        described = logged.tap.described
        if described is None:
            return
        if described.tap_kind.is_check:
            taker.check(run, described, np.array([place]))
            return
        arrays = [np.asarray(array) for array in logged.message.arrays]
        names = logged.tap.leaf_names(len(arrays))
        columns = [
            Column(name, value.dtype, (), value.shape, logged.tap.is_step(index, value.shape, value.dtype))
            for index, (name, value) in enumerate(zip(names, arrays, strict=False))
        ]
        known = self._known(run, run_name, tuple((value.shape, value.dtype, None) for value in arrays))
        steps = np.array([float(NO_STEP) if logged.step is None else float(logged.step)])
        times = np.array([logged.message.time_ns / 1e9])
        has_step = logged.step is not None
        leaves = known.get(described.consumer_id)
        if leaves is None:
            views = [value[np.newaxis] for value in arrays]
            leaves = self._new_leaves(known, run_name, described, columns, views, 0)
        for index, tap, axes in leaves:
            value = arrays[index] if index >= 0 else np.empty(0)
            if tap.kind == "time":
                runs = runs_by_device(value[np.newaxis], axes, run.device, first_device(logged.message))
                taker.times(tap, _of_calls(runs, steps, times, np.zeros(1, np.int64), has_step), runs)
                continue
            if tap.kind != "scalar" or not 0 < value.size <= LANES or value.dtype.kind not in "biufcV":
                taker.other(tap, 1)
                continue
            values = buckets.real_values(value.reshape(1, -1))
            rows = buckets.of_messages(values, steps, times, np.zeros(1, np.int64))
            finite = bool(np.isfinite(values).all())
            taker.scalar(tap, ScalarPart(rows, values, steps, times, has_step, finite))


def _of_calls(
    by_device: dict[str, Array], steps: Array, times: Array, starts: Array, has_steps: bool
) -> ScalarPart:
    # The seconds of each call of a place, on each device; NaN where it did not run.
    calls = np.stack([np.nansum(runs, axis=1, dtype=np.float64) for runs in by_device.values()], axis=1)
    calls[np.stack([np.isnan(runs).all(axis=1) for runs in by_device.values()], axis=1)] = np.nan
    rows = buckets.of_messages(calls, steps, times, starts)
    return ScalarPart(rows, calls, steps, times, has_steps, is_finite=True)


def has_texts(described: TapDescriptor) -> bool:
    """Whether the messages of a tap are texts, or have some among their metrics."""
    kind = described.tap_kind
    return kind.is_text or kind.prints or TEXT in _forms(described).values()


def form_of(described: TapDescriptor, leaf: str) -> str | None:
    """The form of a leaf that is a metric, "scalar" for other values, None for an argument of a text."""
    kind, forms = described.tap_kind, _forms(described)
    if not kind.has_metrics or kind.is_text or forms.get(leaf.rpartition("/")[0]) == TEXT:
        return None
    return forms.get(leaf, SCALAR)


def _forms(described: TapDescriptor) -> dict[str, str]:
    # By name of the metric; what does not fit, of a foreign description, is left out.
    given = described.params.get("forms") if described.tap_kind is METRICS else None
    items = given.items() if isinstance(given, dict) else ()
    return {name: form[0] for name, form in items if isinstance(form, list) and form and type(form[0]) is str}
