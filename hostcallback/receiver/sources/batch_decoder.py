"""Decodes a batch of frames into the messages that the dispatcher delivers, many alike messages at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.sources.columns import BatchColumns, Group
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.wire import Decoder, Flags, Plan, WireError, decode_header
from hostcallback.receiver.wire.dtypes import Array

DecodedMessage = tuple[int, int, int, int, int, int, Sequence[Array]]
"""consumer_id, flags, seq, time_ns, run_id, count, arrays. For a stack, `count` is the number of messages, which lie
along a new first axis, and the other numbers are those of the last message; for a single message `count` is 0."""

MIN_BATCH = 8
"""A batch of fewer messages is decoded one by one."""

MIN_ALIKE = 4
"""Fewer messages of one kind are decoded one by one: setting up their group costs more than it saves."""

CHUNK_BYTES = 8 << 10
"""Bytes of arrays that share memory. A consumer that keeps one small array keeps at most this much alive."""

_BATCHED = int(Flags.BATCHED)
_LATER = object()  # placeholder: the message's arrays are in a stack, which stands at a later message
_WRITABLE: Any = [["readwrite"]]


class DecodedBatch(NamedTuple):
    """The content of one batch.

    Attributes:
        items: messages in order of emission; iterate only once. Where possible they are created during iteration, so
            that the garbage collector does not track thousands of tuples.
        nbytes: of all arrays.
        first_time_ns: emission time of the first message in Unix nanoseconds; 0 if the batch has no message.
        last_seq: sequence number of the last frame, even if only its header can be decoded; -1 if that cannot either.
        stacked: whether any messages are stacked.
    """

    items: Iterable[DecodedMessage]
    nbytes: int
    first_time_ns: int
    last_seq: int
    stacked: bool


class BatchDecoder:
    """Decodes the batches of one device. One thread at a time, the device's reader."""

    def __init__(self, lose: Callable[[WireError], None]) -> None:
        """The decoder calls `lose` with the error of each frame that cannot be decoded."""
        self._decoder = Decoder()
        self._lose = lose

    def decode(self, batch: Batch) -> DecodedBatch:
        """Decodes a batch.

        Returns:
            Messages whose numpy arrays have the shapes and dtypes of the frames' metadata (of a stack, with the
            count as a new first axis). The arrays own fresh memory, so the batch may be released; small alike ones
            may share it.
        """
        if batch.count >= MIN_BATCH and batch.columns is not None:
            return self._decode_columns(batch, batch.columns)
        decode = self._decoder.decode
        items: list[DecodedMessage] = []
        nbytes = seen = 0
        for memory, offset, external in batch.frames:
            try:
                consumer_id, flags, seq, time_ns, run_id, _, arrays = decode(memory, offset, external)
            except WireError as error:
                self._lose(error)
                continue
            for array in arrays:
                nbytes += array.nbytes
            seen |= flags
            items.append((consumer_id, flags, seq, time_ns, run_id, 0, arrays))
        first_time_ns = items[0][3] if items else 0
        last_seq = items[-1][2] if len(items) == batch.count else _last_seq(batch)
        batched = bool(seen & _BATCHED)
        return DecodedBatch(_stacked(items) if batched else items, nbytes, first_time_ns, last_seq, batched)

    def _decode_columns(self, batch: Batch, columns: BatchColumns) -> DecodedBatch:
        columns.read(batch.count)
        groups = columns.groups()
        if groups and groups[0].size == batch.count:
            plan = self._plan_for(columns, groups[0])
            if plan is not None:
                return self._decode_alike(columns, groups[0], plan)
        *numbers, order = columns.lists()
        arrays: list[Any] = [None] * batch.count
        stacked: list[int] | None = None
        nbytes = done = 0
        for group in groups:
            plan = self._plan_for(columns, group)
            if plan is None:
                continue
            done += group.size
            nbytes += group.size * plan.nbytes
            places = order[group.first : group.first + group.size]
            if numbers[1][group.frame] & _BATCHED:
                for place in places:
                    arrays[place] = _LATER
                arrays[places[-1]] = _stacks(columns, group, plan)
                stacked = stacked or [0] * batch.count
                # At the place of the last one: a stack must not be delivered before a message that was
                # emitted before its last row.
                stacked[places[-1]] = group.size
            else:
                for place, parts in zip(places, _unstack(columns, group, plan), strict=True):
                    arrays[place] = parts
        items: Iterable[DecodedMessage] = zip(*numbers, stacked or repeat(0), arrays)  # noqa: B905 (repeat has no end)
        batched = stacked is not None
        if done < batch.count:
            nbytes += self._decode_rest(batch, arrays)
            batched = batched or any(flags & _BATCHED for flags in numbers[1])
            items = _stacked([item for item in items if item[-1] is not _LATER])
        elif batched:
            items = [item for item in items if item[-1] is not _LATER]
        return DecodedBatch(items, nbytes, numbers[3][0], numbers[2][-1], batched)

    def _decode_alike(self, columns: BatchColumns, group: Group, plan: Plan) -> DecodedBatch:
        # The whole batch is of one kind, as the messages of a scan with one tap are.
        nbytes = group.size * plan.nbytes
        first_time_ns = columns.numbers(0)[3]
        consumer_id, flags, seq, time_ns, run_id = columns.numbers(group.size - 1)
        if flags & _BATCHED:
            item = (consumer_id, flags, seq, time_ns, run_id, group.size, _stacks(columns, group, plan))
            return DecodedBatch([item], nbytes, first_time_ns, seq, stacked=True)
        *numbers, _ = columns.lists()
        items = zip(*numbers, repeat(0), _unstack(columns, group, plan))
        return DecodedBatch(items, nbytes, first_time_ns, seq, stacked=False)

    def _plan_for(self, columns: BatchColumns, group: Group) -> Plan | None:
        # None has the messages decoded one by one, which reports each invalid one.
        if group.size < MIN_ALIKE:
            return None
        try:
            plan = self._decoder.plan(columns.memory, columns.offset(group.frame))
        except WireError:
            return None
        return plan if plan.stackable and plan.payload_bytes == group.payload_bytes else None

    def _decode_rest(self, batch: Batch, arrays: list[Any]) -> int:
        nbytes = 0
        for place, (memory, offset, external) in enumerate(batch.frames):
            if arrays[place] is not None:
                continue
            try:
                arrays[place] = self._decoder.decode(memory, offset, external)[-1]
            except WireError as error:
                self._lose(error)
                arrays[place] = _LATER
            else:
                nbytes += sum(array.nbytes for array in arrays[place])
        return nbytes


def _last_seq(batch: Batch) -> int:
    memory, offset, _ = batch.frames[-1]
    try:
        return decode_header(memory, offset).seq
    except WireError:
        return -1


def _stride(plan: Plan) -> int:
    # With a single array no padding is needed to align the next one.
    return plan.payload_bytes if len(plan.entries) == 1 else (plan.payload_bytes + 7) & -8


def _stacks(columns: BatchColumns, group: Group, plan: Plan) -> list[Array]:
    stride = _stride(plan)
    views = plan.views(columns.stack(group.first, group.size, stride), group.size, stride)
    # Several arrays are copied, so that a consumer that keeps one of them does not keep the memory of all.
    return views if len(views) == 1 else [view.copy() for view in views]


def _unstack(columns: BatchColumns, group: Group, plan: Plan) -> Iterator[tuple[Array, ...]]:
    # Copies everything at once: the batch's memory is released before its messages are delivered.
    stride = _stride(plan)
    at_once = max(1, CHUNK_BYTES // stride) if stride else group.size
    rows: list[list[Array]] = [[] for _ in plan.entries]
    for done in range(0, group.size, at_once):
        count = min(at_once, group.size - done)
        views = plan.views(columns.stack(group.first + done, count, stride), count, stride)
        for of_one, view in zip(rows, views, strict=True):
            of_one += _rows(view)
    return zip(*rows, strict=True)


def _rows(stack: Array) -> list[Array]:
    # Indexing or iterating over one dimension makes scalars; nditer makes arrays, in a quarter of the time.
    if stack.ndim == 1:
        rows: list[Any] = list(np.nditer(stack, op_flags=_WRITABLE))
        return rows
    return list(stack)


def _waits_for_others(item: DecodedMessage) -> bool:
    return bool(item[1] & _BATCHED) and not item[5]


def _stacked(items: list[DecodedMessage]) -> list[DecodedMessage]:
    """The same messages, with alike messages of consumers that take stacks combined into stacks."""
    if not any(map(_waits_for_others, items)):
        return items
    alike: dict[Any, list[int]] = {}
    for place, item in enumerate(items):
        if _waits_for_others(item):
            key = (item[0], *[(array.shape, array.dtype) for array in item[-1]])
            alike.setdefault(key, []).append(place)
    last = {places[-1]: places for places in alike.values()}
    stacked: list[DecodedMessage] = []
    for place, item in enumerate(items):
        if not _waits_for_others(item):
            stacked.append(item)
        elif place in last:
            parts = zip(*[items[k][-1] for k in last[place]], strict=True)
            stacked.append((*item[:5], len(last[place]), [np.stack(part) for part in parts]))
    return stacked
