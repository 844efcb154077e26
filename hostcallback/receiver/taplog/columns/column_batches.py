"""Reads the messages of taps as columns, many alike messages at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import IncompleteValueError, WireError
from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.batches import batch_axes, batchings_of
from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from hostcallback.receiver.taplog.format.block import FrameBlock, alike_groups, even_stride, words_of
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage
from hostcallback.receiver.taplog.reading import logged_message, merge, segment_reader
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire import decoder, frame, tap_descriptor, truncation
from hostcallback.receiver.wire.array_types import Array

Described = tap_descriptor.TapDescriptor | None

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Column(NamedTuple):
    """The layout of one leaf.

    Attributes:
        name: keys of the leaf, joined by slashes; empty if an array alone was tapped.
        dtype: of its elements.
        lanes: number of lanes of each vmap, the outermost first; 1 for a vmap that did not batch this leaf.
        shape: shape of one lane's value.
        is_step: whether it is the step of its messages.
    """

    name: str
    dtype: np.dtype[Any]
    lanes: tuple[int, ...]
    shape: tuple[int, ...]
    is_step: bool = False


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
        return self if count >= len(self) else self.chosen(slice(count))

    def chosen(self, which: slice | Array) -> ColumnBatch:
        """Returns the messages with some indices, in their order."""
        numbers = self.steps[which], self.times_ns[which], self.seqs[which]
        return ColumnBatch(*self[:3], *numbers, tuple(array[which] for array in self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.steps, self.times_ns, self.seqs, *self.values))


def layout_of(columns: Sequence[Column]) -> tuple[Column, ...]:
    """What the columns of all batches of one table share: in it, int32 is int64, which JAX makes of larger integers."""
    return tuple(c._replace(dtype=_INT64) if c.dtype == _INT32 else c for c in columns)


def wider(columns: Sequence[Column], others: Sequence[Column]) -> tuple[Column, ...]:
    """The columns of one table for batches that share its layout: int64 where one has int64."""
    return tuple(max(pair, key=lambda c: c.dtype.itemsize) for pair in zip(columns, others, strict=True))


def joined(batches: Sequence[ColumnBatch]) -> ColumnBatch:
    """Joins batches of one device and layout, see `layout_of`."""
    first = batches[0]
    if len(batches) == 1:
        return first
    steps, times, seqs = (np.concatenate([batch[place] for batch in batches]) for place in (3, 4, 5))
    values = tuple(np.concatenate(parts) for parts in zip(*[batch.values for batch in batches], strict=True))
    columns = functools.reduce(wider, dict.fromkeys(batch.columns for batch in batches))
    return ColumnBatch(columns, *first[1:3], steps, times, seqs, values)


def _in_order(batches: Iterable[ColumnBatch]) -> Iterator[ColumnBatch]:
    # The messages of a device come by tap: taps of one name, of several source lines, are one tap of the log.
    by_layout: dict[tuple[Column, ...], list[ColumnBatch]] = {}
    for batch in batches:
        by_layout.setdefault(layout_of(batch.columns), []).append(batch)
    for alike in by_layout.values():
        batch = joined(alike)
        if len(alike) > 1 and (batch.seqs[1:] < batch.seqs[:-1]).any():
            batch = batch.chosen(np.argsort(batch.seqs, kind="stable"))
        yield batch


class Layouts:
    """How the arrays of a tap become columns: by tap and metadata."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._known: dict[Any, tuple[tuple[Column, ...], list[list[int]]]] = {}

    def of(self, described: Described, arrays: Sequence[tuple[Any, Any]], *, has_lanes: bool = True) -> Any:
        """Columns, and per array the axes of its lanes and of its value, for (shape, dtype) of each array."""
        key = (has_lanes, (described.consumer_id, described.name) if described else 0, *arrays)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(described, arrays, has_lanes)
        return found

    def _new(self, described: Described, arrays: Sequence[tuple[Any, Any]], has_lanes: bool) -> Any:
        tap = logged_message.LoggedTap(0, described)
        names = tap.leaf_names(len(arrays))
        dims = batchings_of(described.transforms) if described is not None and has_lanes else []
        columns, orders = [], []
        for index, (name, (shape, dtype)) in enumerate(zip(names, arrays, strict=False)):
            try:
                axes = batch_axes(len(shape), [level[index] for level in dims])
            except (IndexError, TypeError):  # the description does not fit: no axis is a lane's
                axes = {}
            levels = [axes.get(level) for level in reversed(range(len(dims)))]
            lanes = tuple(1 if axis is None else shape[axis] for axis in levels)
            rest = [axis for axis in range(len(shape)) if axis not in axes.values()]
            own_shape = tuple(shape[axis] for axis in rest)
            columns.append(Column(name, np.dtype(dtype), lanes, own_shape, tap.is_step(index, shape, dtype)))
            orders.append([axis for axis in levels if axis is not None] + rest)
        return tuple(columns), orders


class ColumnReader:
    """Reads columns of a log. One thread."""

    def __init__(self, reader: LogReader) -> None:
        """`reader` has the log open."""
        self._reader = reader
        self._alike = AlikeReader()
        self._layouts = Layouts()
        self._folded = 0  # failures of checks that were only counted
        self._processes: dict[segment_reader.Writer, int] = {
            writer: n for n, writer in enumerate(reader.writers)
        }

    def batches(
        self, wants: Wants, selection: Selection, *, whole: bool, warns: bool = True
    ) -> Iterator[ColumnBatch]:
        """Yields the messages of taps; those of a device in order.

        Args:
            wants: whether a tap is wanted.
            selection: further conditions.
            whole: whether messages must be read one by one, because values are assembled from shards.
            warns: whether missing messages are logged.

        At the end it logs a warning if messages are missing, because parts of the log are damaged or messages were
        dropped before they were recorded, or failures of a check were only counted.
        """
        self._folded = 0
        missing: list[Damage | merge.LostNote] = []
        assembler = _Assembler()
        records = (
            self._reader.values(selection) if whole else self._reader.message_runs(selection, by_time=False)
        )
        for record in records:
            if isinstance(record, merge.Stretch):
                found = self._alike.of_run(record, wants)
                yield from _in_order(self._batch(each) for each in found if not isinstance(each, Damage))
            elif isinstance(record, logged_message.LoggedMessage):
                if wants(record.tap.described, record.message.consumer.name):
                    yield from (self._batch(AlikeMessages.one(each)) for each in assembler.take(record))
            elif isinstance(record, merge.LostNote) or not record.torn:
                missing.append(record)
        assembler.warn()
        if missing and warns:
            first = missing[0].lost.reason if isinstance(missing[0], merge.LostNote) else missing[0]
            logger.warning("messages are missing in %d place(s) of the log, first: %s", len(missing), first)
        if self._folded and warns:
            logger.warning("%d more failure(s) of checks have no row: they were only counted", self._folded)

    def exported(self) -> list[tap_descriptor.TapDescriptor]:
        """Returns the descriptors of taps of exported programs, which are in their messages. Reads these messages."""
        found: dict[tuple[str, int], tap_descriptor.TapDescriptor] = {}

        def take(described: Described, name: str) -> bool:
            if described is not None and len(found) < logged_message.MAX_EXPORTED:
                found.setdefault((described.name, described.consumer_id), described)
            return False

        undescribed = Selection(names=("\0",))  # taps with a descriptor of their own are not read
        for _ in self.batches(take, undescribed, whole=False, warns=False):
            pass
        return [*found.values()]

    def _batch(self, alike: AlikeMessages) -> ColumnBatch:
        arrays, described = alike.arrays, alike.tap.described
        self._folded += int(alike.folded.sum())
        truncated = truncation.is_truncated(arrays)  # then the axes are not those of the descriptor
        shapes = [(array.shape[1:], array.dtype) for array in arrays]
        columns, orders = self._layouts.of(described, shapes, has_lanes=not truncated)
        values = tuple(
            np.asarray(array)
            .transpose([0, *(axis + 1 for axis in order)])
            .reshape(alike.messages, *column.lanes, *column.shape)
            for array, column, order in zip(arrays, columns, orders, strict=False)
        )
        process = self._processes.get(alike.writer, 0)
        return ColumnBatch(
            columns, process, alike.device, alike.steps, alike.times_ns, alike.seqs, values
        )  # fmt: skip


class _Assembler:
    # Assembles the values that one process has all shards of.

    def __init__(self) -> None:
        self._sinks: dict[tuple[str, int], AssemblingSink] = {}
        self._found: list[Message] = []
        self._lost = 0

    def take(self, logged: logged_message.LoggedMessage) -> Iterator[logged_message.LoggedMessage]:
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


_TRUNCATED = np.uint64(int(frame.Flags.TRUNCATED))
FEW = 8
"""Fewer alike messages are decoded one by one."""

Wants = Callable[[Described, str], bool]
"""Whether a tap is wanted, by its descriptor and name."""


class AlikeMessages(NamedTuple):
    """Messages of one tap, device and layout.

    Attributes:
        tap: their tap.
        writer: the process that logged them.
        device: the device's name.
        steps: int64, shape (messages,); `NO_STEP` for messages without a step.
        times_ns: emission times, Unix nanoseconds, int64, shape (messages,).
        seqs: sequence numbers on the device, uint64, shape (messages,).
        launches: of the program, int64, shape (messages,).
        folded: numbers of failures of the same check that were left out before each, uint64, shape (messages,).
        arrays: each array of all messages, shape (messages, *shape); a `TruncatedArray` if a rule truncated it.
        places: of each array its position in the whole array, if that was partitioned over devices; else None.
    """

    tap: logged_message.LoggedTap
    writer: segment_reader.Writer
    device: str
    steps: Array
    times_ns: Array
    seqs: Array
    launches: Array
    folded: Array
    arrays: list[Array]
    places: tuple[tuple[slice, ...], ...] | None = None

    @property
    def messages(self) -> int:
        """Number of messages."""
        return len(self.steps)

    @property
    def layout(self) -> Any:
        """Equal for messages of one tap whose arrays have equal dtypes and shapes."""
        leaves = [(leaf.array.dtype, leaf.array.shape[1:], leaf.whole_shape) for leaf in self.leaves]
        return self.tap, self.places is None, *leaves

    @property
    def leaves(self) -> list[logged_message.Leaf]:
        """The arrays by name."""
        return self.tap.leaves(self.arrays, self.places)

    @classmethod
    def one(cls, logged: logged_message.LoggedMessage) -> AlikeMessages:
        """A decoded message."""
        message = logged.message
        numbers = (
            np.array([NO_STEP if logged.step is None else logged.step], np.int64),
            np.array([message.time_ns], np.int64),
            np.array([message.seq], np.uint64),
            np.array([message.run_id], np.int64),
            np.array([logged.folded], np.uint64),
        )
        arrays = [truncation.stack_of_one(array) for array in message.arrays]
        return cls(
            logged.tap, logged.writer, str(message.device), *numbers, arrays, message.shard_index
        )  # fmt: skip


class AlikeReader:
    """Reads message runs. One thread."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._decoder = decoder.Decoder()
        self._taps = logged_message.MessageDecoder()

    def read(self, reader: LogReader, selection: Selection) -> Iterator[AlikeMessages | Damage]:
        """Yields the messages of a log as the devices sent them, by time, with damage in its place."""
        for record in reader.message_runs(selection):
            if isinstance(record, merge.Stretch):
                yield from self.of_run(record, lambda described, name: selection.wants_name(name))
            elif isinstance(record, Damage):
                yield record

    def of_run(self, run: merge.Stretch, wants: Wants) -> Iterator[AlikeMessages | Damage]:
        """Yields the wanted messages of a run, those of a tap and layout together."""
        block = run.block.part(run.start, run.stop)
        parts: list[tuple[int, Array]] = []
        for consumer_id in block.consumers:
            described = run.described.get(consumer_id)
            if described is None or wants(described, described.name):
                where = np.flatnonzero(block.consumer_ids == consumer_id)
                parts += ((consumer_id, places) for places in alike_groups(block, where))
        for consumer_id, places in sorted(parts, key=lambda part: int(part[1][0])):
            plan, is_described = self._plan(block, places), consumer_id in run.described
            if plan is None or not (is_described or consumer_id == WHOLE_ID):
                yield from self._one_by_one(run, places, wants)
                continue
            groups = (
                iter([(places, self._taps.tap(run, consumer_id))])
                if is_described
                else self._exported(block, places, plan)
            )
            own = 0 if is_described else 1  # arrays that are no leaves
            for same, tap in groups:
                if tap is None or tap.mask is not None or tap.records is not None:
                    yield from self._one_by_one(run, same, wants)
                elif wants(tap.described, tap.consumer.name):
                    yield _stacked(run, block, same, tap, array_views(block, same, plan)[own:])

    def _plan(self, block: FrameBlock, places: Array) -> decoder.Plan | None:
        if len(places) < FEW or (block.flags[places] & _TRUNCATED).any():
            return None
        try:
            plan = self._decoder.plan(block.data, int(block.offsets[places[0]]))
        except WireError:
            return None
        fits = plan.stackable and plan.payload_bytes == int(block.payload_bytes[places[0]])
        return plan if fits else None

    def _one_by_one(
        self, run: merge.Stretch, places: Array, wants: Wants
    ) -> Iterator[AlikeMessages | Damage]:
        for place in (places + run.start).tolist():
            for logged in self._taps.messages(run._replace(start=place, stop=place + 1)):
                if isinstance(logged, Damage):
                    yield logged
                elif wants(logged.tap.described, logged.message.consumer.name):
                    yield AlikeMessages.one(logged)

    def _exported(
        self, block: FrameBlock, places: Array, plan: decoder.Plan
    ) -> Iterator[tuple[Array, logged_message.LoggedTap | None]]:
        # Messages of exported programs carry their tap's descriptor as the first array: those of each descriptor.
        # None for one that is not valid.
        descriptions = np.ascontiguousarray(array_views(block, places, plan)[0])
        while len(places):
            same = (descriptions == descriptions[0]).reshape(len(places), -1).all(axis=1)
            try:
                yield places[same], self._taps.exported(descriptions[0].tobytes())
            except ValueError:
                yield places[same], None
            places, descriptions = places[~same], descriptions[~same]


def _stacked(
    run: merge.Stretch, block: FrameBlock, places: Array, tap: logged_message.LoggedTap, arrays: list[Array]
) -> AlikeMessages:
    if 2 * sum(array.nbytes for array in arrays) < block.data.nbytes:
        arrays = [array.copy() for array in arrays]  # views would keep the whole block
    seqs = block.seqs[places]
    folded = np.zeros(len(places), np.uint64)
    if run.folded:
        folded[:] = [run.folded.pop(seq, 0) for seq in seqs.tolist()]
    numbers = run.steps[places + run.start], block.times_ns[places], seqs, block.launches[places], folded
    return AlikeMessages(tap, run.writer, run.device, *numbers, arrays)


def array_views(block: FrameBlock, places: Array, plan: decoder.Plan) -> list[Array]:
    """The arrays of alike messages, each of shape (messages, *shape)."""
    offsets, count = block.offsets[places], len(places)
    stride = even_stride(offsets)
    if stride:
        payloads = block.data[int(offsets[0]) + plan.payload_start :]
    else:
        words = (plan.payload_bytes + 7) // 8
        payloads = (
            np.ascontiguousarray(words_of(block, places, plan.payload_start, words))
            .view(np.uint8)
            .reshape(-1)
        )
        stride = words * 8
    return list(plan.views(payloads, count, stride))
