"""Reads the messages of taps as columns, many alike messages at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import IncompleteValueError
from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.sinks.lane_mask import LaneMask
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from hostcallback.receiver.sinks.tap import batch_axes, batchings_of
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.logged_message import (
    MAX_EXPORTED,
    LoggedMessage,
    LoggedTap,
    RunDecoder,
)
from hostcallback.receiver.taplog.reading.merge import LostRun, MessageRun
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render.text import leaf_names
from hostcallback.receiver.wire import Decoder, Flags, WireError
from hostcallback.receiver.wire.codec import Plan
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostcallback.receiver.wire.truncation import is_truncated

_TRUNCATED = np.uint64(int(Flags.TRUNCATED))
FEW = 8
"""Fewer alike messages are decoded one by one."""


class Column(NamedTuple):
    """The layout of one leaf.

    Attributes:
        name: keys of the leaf, joined by slashes; empty if an array alone was tapped.
        dtype: of its elements.
        lanes: number of lanes of each vmap, the outermost first; 1 for a vmap that did not batch this leaf.
        shape: shape of one lane's value.
    """

    name: str
    dtype: np.dtype[Any]
    lanes: tuple[int, ...]
    shape: tuple[int, ...]


class ColumnBatch(NamedTuple):
    """Consecutive messages of one tap, device and layout, as columns.

    Attributes:
        columns: the layout, equal for all batches of one table.
        process: index of the process among those of the log.
        device: the device's name.
        steps: int64, shape (messages,); `NO_STEP` for messages without a step.
        times_ns: emission times, Unix nanoseconds, int64, shape (messages,).
        seqs: sequence numbers on the device, uint64, shape (messages,).
        values: an array for each column, shape (messages, *lanes, *shape).
    """

    columns: tuple[Column, ...]
    process: int
    device: str
    steps: Array
    times_ns: Array
    seqs: Array
    values: tuple[Array, ...]

    def __len__(self) -> int:
        """Number of messages."""
        return len(self.steps)

    def first(self, count: int) -> ColumnBatch:
        """Returns the first `count` messages."""
        if count >= len(self):
            return self
        shared = self.columns, self.process, self.device
        rest = self.steps[:count], self.times_ns[:count], self.seqs[:count]
        return ColumnBatch(*shared, *rest, tuple(array[:count] for array in self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.steps, self.times_ns, self.seqs, *self.values))


def joined(batches: Sequence[ColumnBatch]) -> ColumnBatch:
    """Joins batches of one device and layout."""
    first = batches[0]
    if len(batches) == 1:
        return first
    steps, times, seqs = (np.concatenate([batch[place] for batch in batches]) for place in (3, 4, 5))
    values = tuple(np.concatenate(parts) for parts in zip(*[batch.values for batch in batches], strict=True))
    return ColumnBatch(first.columns, first.process, first.device, steps, times, seqs, values)


def _in_order(batches: Iterable[ColumnBatch]) -> Iterator[ColumnBatch]:
    # The messages of a device come by tap: taps of one name, of several source lines, are one tap of the log.
    by_layout: dict[tuple[Column, ...], list[ColumnBatch]] = {}
    for batch in batches:
        by_layout.setdefault(batch.columns, []).append(batch)
    for alike in by_layout.values():
        batch = joined(alike)
        if len(alike) > 1 and (batch.seqs[1:] < batch.seqs[:-1]).any():
            order = np.argsort(batch.seqs, kind="stable")
            steps, times, seqs = (array[order] for array in (batch.steps, batch.times_ns, batch.seqs))
            values = tuple(array[order] for array in batch.values)
            batch = ColumnBatch(batch.columns, batch.process, batch.device, steps, times, seqs, values)
        yield batch


class Layouts:
    """How the arrays of a tap become columns: by tap and metadata."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._known: dict[Any, tuple[tuple[Column, ...], list[list[int]]]] = {}

    def of(self, described: TapDescriptor | None, arrays: Sequence[tuple[tuple[int, ...], Any]]) -> Any:
        """Columns, and per array the axes of its lanes and of its value, for (shape, dtype) of each array."""
        key = ((described.consumer_id, described.name) if described else 0, *arrays)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(described, arrays)
        return found

    def _new(self, described: TapDescriptor | None, arrays: Sequence[tuple[tuple[int, ...], Any]]) -> Any:
        names = leaf_names(LoggedTap(0, described), len(arrays))
        dims = [] if described is None else batchings_of(described.transforms)
        columns, orders = [], []
        for index, (name, (shape, dtype)) in enumerate(zip(names, arrays, strict=False)):
            try:
                axes = batch_axes(len(shape), [level[index] for level in dims])
            except (IndexError, TypeError):  # the description does not fit: no axis is a lane's
                axes = {}
            levels = [axes.get(level) for level in reversed(range(len(dims)))]
            lanes = tuple(1 if axis is None else shape[axis] for axis in levels)
            rest = [axis for axis in range(len(shape)) if axis not in axes.values()]
            columns.append(Column(name, np.dtype(dtype), lanes, tuple(shape[axis] for axis in rest)))
            orders.append([axis for axis in levels if axis is not None] + rest)
        return tuple(columns), orders


class ColumnReader:
    """Reads columns of a log. One thread."""

    def __init__(self, reader: LogReader) -> None:
        """`reader` has the log open."""
        self._reader = reader
        self._decoder = Decoder()
        self._layouts = Layouts()
        self._processes: dict[Writer, int] = {writer: n for n, writer in enumerate(reader.writers)}

    def batches(
        self,
        wants: Callable[[TapDescriptor | None, str], bool],
        selection: Selection,
        *,
        whole: bool,
        warns: bool = True,
    ) -> Iterator[ColumnBatch]:
        """Yields the messages of taps; those of a device in order.

        Args:
            wants: whether a tap is wanted, by its descriptor and name.
            selection: further conditions.
            whole: whether messages must be read one by one, because values are assembled from shards.
            warns: whether missing messages are logged.

        At the end it logs a warning if messages are missing, because parts of the log are damaged or messages were
        dropped before they were recorded.
        """
        missing: list[Damage | LostRun] = []
        assembler, decoder = _Assembler(), RunDecoder()
        records = (
            self._reader.values(selection) if whole else self._reader.message_runs(selection, by_time=False)
        )
        for record in records:
            if isinstance(record, MessageRun):
                yield from _in_order(self._of_run(record, wants, decoder))
            elif isinstance(record, LoggedMessage):
                if wants(record.tap.described, record.message.consumer.name):
                    yield from map(self._single, assembler.take(record))
            elif isinstance(record, LostRun) or not record.torn:
                missing.append(record)
        assembler.warn()
        if missing and warns:
            first = missing[0].lost.reason if isinstance(missing[0], LostRun) else missing[0]
            logger.warning("messages are missing in %d place(s) of the log, first: %s", len(missing), first)

    def _of_run(
        self, run: MessageRun, wants: Callable[[TapDescriptor | None, str], bool], decoder: RunDecoder
    ) -> Iterator[ColumnBatch]:
        block = run.block.part(run.start, run.stop)
        steps = run.steps[run.start : run.stop]
        for consumer_id in block.consumers:
            described = run.described.get(consumer_id)
            if described is not None and not wants(described, described.name):
                continue
            where = np.flatnonzero(block.consumer_ids == consumer_id) if len(block.consumers) > 1 else None
            places = np.arange(len(block)) if where is None else where
            for alike in alike_groups(block, places):
                known = described is not None and LaneMask.of(described.transforms) is None
                plan = self._plan(block, alike) if known or consumer_id == WHOLE_ID else None
                if plan is None:
                    yield from self._one_by_one(run, alike, wants, decoder)
                    continue
                groups = [(alike, described)] if described is not None else self._exported(block, alike, plan)
                own = 1 if described is None else 0  # arrays that are no leaves
                for same, tap in groups:
                    if tap is None or LaneMask.of(tap.transforms) is not None:
                        yield from self._one_by_one(run, same, wants, decoder)
                        continue
                    if not wants(tap, tap.name):
                        continue
                    shapes = [(shape, dtype) for shape, dtype, _, _ in plan.entries[own:]]
                    columns, orders = self._layouts.of(tap, shapes)
                    values = _values(array_views(block, same, plan)[own:], columns, orders)
                    if 2 * sum(array.nbytes for array in values) < block.data.nbytes:
                        values = tuple(array.copy() for array in values)  # views would keep the whole block
                    yield ColumnBatch(
                        columns, self._processes[run.writer], run.device, steps[same], block.times_ns[same],
                        block.seqs[same], values,
                    )  # fmt: skip

    def _exported(
        self, block: FrameBlock, places: Array, plan: Plan
    ) -> Iterator[tuple[Array, TapDescriptor | None]]:
        # Messages of exported programs carry their tap's descriptor as the first array: those of each descriptor.
        # None for one that is not valid.
        descriptions = np.ascontiguousarray(array_views(block, places, plan)[0])
        while len(places):
            same = (descriptions == descriptions[0]).reshape(len(places), -1).all(axis=1)
            try:
                yield places[same], TapDescriptor.unpack(descriptions[0].tobytes())
            except ValueError:
                yield places[same], None
            places, descriptions = places[~same], descriptions[~same]

    def exported(self) -> list[TapDescriptor]:
        """Returns the descriptors of taps of exported programs, which are in their messages. Reads these messages."""
        found: dict[tuple[str, int], TapDescriptor] = {}

        def take(described: TapDescriptor | None, name: str) -> bool:
            if described is not None and len(found) < MAX_EXPORTED:
                found.setdefault((described.name, described.consumer_id), described)
            return False

        undescribed = Selection(names=("\0",))  # taps with a descriptor of their own are not read
        for _ in self.batches(take, undescribed, whole=False, warns=False):
            pass
        return [*found.values()]

    def _plan(self, block: FrameBlock, places: Array) -> Plan | None:
        if len(places) < FEW or (block.flags[places] & _TRUNCATED).any():
            return None
        try:
            plan = self._decoder.plan(block.data, int(block.offsets[places[0]]))
        except WireError:
            return None
        fits = plan.stackable and plan.payload_bytes == int(block.payload_bytes[places[0]])
        return plan if fits else None

    def _one_by_one(
        self,
        run: MessageRun,
        places: Array,
        wants: Callable[[TapDescriptor | None, str], bool],
        decoder: RunDecoder,
    ) -> Iterator[ColumnBatch]:
        for place in (places + run.start).tolist():
            for logged in decoder.messages(run._replace(start=place, stop=place + 1)):
                if not isinstance(logged, Damage) and wants(
                    logged.tap.described, logged.message.consumer.name
                ):
                    yield self._single(logged)

    def _single(self, logged: LoggedMessage) -> ColumnBatch:
        message = logged.message
        arrays = [np.asarray(array) for array in message.arrays]
        described = None if is_truncated(message.arrays) else logged.tap.described
        columns, orders = self._layouts.of(described, [(array.shape, array.dtype) for array in arrays])
        if described is None and logged.tap.described is not None:
            names = leaf_names(logged.tap, len(arrays))
            columns = tuple(c._replace(name=name) for c, name in zip(columns, names, strict=False))
        values = tuple(
            array.transpose(order).reshape(1, *column.lanes, *column.shape)
            for array, order, column in zip(arrays, orders, columns, strict=False)
        )
        return ColumnBatch(
            columns, self._processes.get(logged.writer, 0), str(message.device),
            np.array([NO_STEP if logged.step is None else logged.step], np.int64),
            np.array([message.time_ns], np.int64), np.array([message.seq], np.uint64), values,
        )  # fmt: skip


class _Assembler:
    # Assembles the values that one process has all shards of.

    def __init__(self) -> None:
        self._sinks: dict[tuple[str, int], AssemblingSink] = {}
        self._found: list[Message] = []
        self._lost = 0

    def take(self, logged: LoggedMessage) -> Iterator[LoggedMessage]:
        described, shard = logged.tap.described, logged.shard
        if shard is None or described is None or (described.shards, described.sharding) != ("all", "global"):
            yield logged
            return
        key = logged.writer.process, described.consumer_id
        sink = self._sinks.get(key)
        if sink is None:
            sink = self._sinks[key] = AssemblingSink(self._found.append, described.device_index, waits=False)
        try:
            sink.take(shard)
        except (IncompleteValueError, MultipleFailures, ValueError):
            self._lost += 1
        found = list(self._found)
        self._found.clear()
        for message in found:
            whole = logged.with_whole(message)
            if whole is not None:
                yield whole

    def warn(self) -> None:
        lost = self._lost + sum(sink.pending_values for sink in self._sinks.values())
        if lost:
            logger.warning(
                "%d sharded value(s) are left out, because some of their shards are not in the log", lost
            )


def alike_groups(block: FrameBlock, places: Array) -> Iterator[Array]:
    """Yields the places of messages with equal metadata, group by group."""
    while len(places):
        first = int(places[0])
        meta_bytes, payload_bytes = block.meta_bytes[first], block.payload_bytes[first]
        alike = (block.meta_bytes[places] == meta_bytes) & (block.payload_bytes[places] == payload_bytes)
        words = (int(meta_bytes) + 7) // 8
        metadata = _words(block, places[alike], 64, words)
        alike[alike] = (metadata == metadata[0]).all(axis=1)
        yield places[alike]
        places = places[~alike]


def _words(block: FrameBlock, places: Array, start: int, count: int) -> Array:
    # `count` words of each message, from byte `start` of the frame on: uint64, shape (messages, count).
    offsets = block.offsets[places]
    stride = _stride(offsets)
    if stride:
        first = int(offsets[0]) + start
        view: Array = np.ndarray((len(places), count), np.uint64, block.data, first, (stride, 8))
        return view
    at = (offsets + start) >> 3
    words: Array = block.data.view(np.uint64)[at[:, np.newaxis] + np.arange(count)]
    return words


def _stride(offsets: Array) -> int:
    # Distance in bytes between messages that follow each other evenly; 0 if they do not.
    if len(offsets) < 2:
        return 64
    step = int(offsets[1] - offsets[0])
    return step if step > 0 and (np.diff(offsets) == step).all() else 0


def array_views(block: FrameBlock, places: Array, plan: Plan) -> list[Array]:
    """The arrays of alike messages, each of shape (messages, *shape)."""
    offsets, count = block.offsets[places], len(places)
    stride = _stride(offsets)
    if stride:
        payloads = block.data[int(offsets[0]) + plan.payload_start :]
    else:
        words = (plan.payload_bytes + 7) // 8
        payloads = (
            np.ascontiguousarray(_words(block, places, plan.payload_start, words)).view(np.uint8).reshape(-1)
        )
        stride = words * 8
    return list(plan.views(payloads, count, stride))


def _values(
    views: Sequence[Array], columns: tuple[Column, ...], orders: list[list[int]]
) -> tuple[Array, ...]:
    return tuple(
        view.transpose([0, *(axis + 1 for axis in order)]).reshape(len(view), *column.lanes, *column.shape)
        for view, column, order in zip(views, columns, orders, strict=False)
    )
