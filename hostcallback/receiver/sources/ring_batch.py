"""One read of a ring: its frames and payloads, decoded into messages, many alike messages at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import environment
from hostcallback.receiver.errors import CorruptStreamError, LostMessagesError, WireError
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.columns import BatchColumns
from hostcallback.receiver.sources.source import Batch, Frame
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.decoder import Decoder, Plan
from hostcallback.receiver.wire.frame import Flags, decode_header


class BlockMemory:
    """Owns one memory block of the native library; numpy arrays that are made from it keep it alive."""

    def __init__(self, library: ctypes.CDLL, address: int, nbytes: int) -> None:
        # Keeps the function itself: at interpreter exit the module may be gone before the last array is.
        self._free = library.hcb_block_free
        self._address = address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        # Any thread may drop the last reference, so the library takes the block back under its own lock.
        self._free(self._address)


class RingBatch:
    """The frames of one read. See `Batch`."""

    __slots__ = (
        "_ends",
        "_frames",
        "_give_back",
        "_memory",
        "_offsets",
        "_payloads",
        "_released",
        "columns",
        "count",
        "folded",
    )

    def __init__(
        self,
        memory: memoryview,
        give_back: Callable[[int, int], None],
        count: int,
        offsets: Any,
        ends: Any,
        payloads: Mapping[int, Any],
        folded: Sequence[int] = (),
        columns: BatchColumns | None = None,
    ) -> None:
        self.count = count
        self.columns = columns
        self.folded = folded
        self._frames: Sequence[Frame] | None = None
        self._memory = memory
        self._give_back = (
            give_back  # takes the position before which memory is free, and the messages it held
        )
        self._offsets = offsets  # like `ends`, a buffer of the source, which its next read overwrites
        self._ends = ends
        self._payloads = payloads  # by index of the frame
        self._released = 0

    @property
    def frames(self) -> Sequence[Frame]:
        """See `Batch`."""
        if self._frames is None:
            memory, payload_of = self._memory, self._payloads.get
            self._frames = [
                (memory, offset, payload_of(place))
                for place, offset in enumerate(self._offsets[: self.count])
            ]
        return self._frames

    def release(self, count: int | None = None) -> None:
        """See `Batch`. Releasing frames again does nothing."""
        upto = self.count if count is None else min(count, self.count)
        if upto > self._released:
            folded = sum(self.folded[self._released : upto])
            self._give_back(self._ends[upto - 1], upto - self._released + folded)
            self._released = upto

    @property
    def released(self) -> bool:
        """Whether all frames were released."""
        return self._released == self.count


@dataclass(frozen=True, slots=True)
class RingConfig(BackPressure):
    """Sizes of a device's ring, and the policy for emissions that find no room.

    Attributes:
        capacity_bytes: memory of the ring, rounded up to a power of two; fixed once the ring exists.
        external_threshold_bytes: larger payloads travel outside the ring; fixed once the ring exists.
        block_budget_bytes: limit for payload bytes outside the ring that the reader has not taken; a single payload
            may exceed it if no other is queued.
    """

    capacity_bytes: int = 8 << 20
    external_threshold_bytes: int = 64 << 10
    block_budget_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that the native library would misread."""
        BackPressure.__post_init__(self)
        for name in ("capacity_bytes", "external_threshold_bytes", "block_budget_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    @classmethod
    def from_environment(cls) -> RingConfig:
        """Returns the defaults with the sizes of `HOSTCALLBACK_RING_BYTES` and `HOSTCALLBACK_BLOCK_BUDGET_BYTES`.

        Raises:
            ValueError: one of them is not a positive whole number.
        """
        default = cls()
        return cls(
            capacity_bytes=environment.RING_BYTES.read() or default.capacity_bytes,
            block_budget_bytes=environment.BLOCK_BUDGET_BYTES.read() or default.block_budget_bytes,
        )

    def native(self) -> native.Config:
        """Returns the configuration as the native library's structure."""
        wait_sec, steps, sample_every = self.admission
        return native.Config(
            self.capacity_bytes,
            self.external_threshold_bytes,
            self.block_budget_bytes,
            0 if wait_sec is None else round(wait_sec * 1e9) or -1,
            steps,
            sample_every,
        )


DAMAGE = {
    1: "bad magic",
    2: "unknown wire format version",
    3: "unknown flags",
    4: "a header that names another position",
    5: "a length beyond the queued bytes",
    6: "a descriptor of an unknown payload block",
}
"""Reasons by the native library's number (`hcb_damage`)."""

_COPY_STEPS = {
    1: "the GPU driver could not be used",
    2: "the GPU driver refused a copy to the host",
    3: "the GPU failed before it finished a copy to the host",
    4: "the host has no memory for an array",
}


class CorruptRingError(CorruptStreamError):
    """A stretch of a ring's memory was overwritten and holds no frames. The stream continues after it.

    Attributes:
        skipped: accepted messages that were lost with the stretch.
        start: position of its first byte in the stream.
        end: position after its last byte.
    """

    def __init__(self, device: int, reason: str, start: int, end: int, skipped: int) -> None:
        """`reason` says what is wrong with the first header of the stretch."""
        super().__init__(
            f"ring of device {device}: {reason} at position {start}: skipped {end - start} bytes with "
            f"{skipped} message(s), up to position {end}. Some code in this process writes into memory that it "
            "does not own; run it under AddressSanitizer",
            skipped,
        )
        self.start = start
        self.end = end


class LostCopiesError(LostMessagesError):
    """A GPU's driver failed to copy messages to the host: they are lost, and the stream continues.

    Attributes:
        count: number of lost messages.
    """

    def __init__(self, device: int, count: int, step: int, code: int) -> None:
        """`step` is the native library's number of the failed step (`hcb_copy_step`), `code` the driver's error."""
        self.count = count
        super().__init__(
            f"device {device}: {count} message(s) were lost: {_COPY_STEPS[step]} (driver error {code}). After an error "
            "a GPU often does nothing more in this process: look for the first error of the program itself"
        )


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
        last_seq = items[-1][2] if len(items) == batch.count else seq_of(batch.frames[-1])
        batched = bool(seen & _BATCHED)
        return DecodedBatch(_stacked(items) if batched else items, nbytes, first_time_ns, last_seq, batched)

    def _decode_columns(self, batch: Batch, columns: BatchColumns) -> DecodedBatch:
        columns.read(batch.count)
        groups = columns.groups()
        if groups and groups[0].count == batch.count:
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
            done += group.count
            nbytes += group.count * plan.nbytes
            places = order[group.first : group.first + group.count]
            if numbers[1][group.frame] & _BATCHED:
                for place in places:
                    arrays[place] = _LATER
                arrays[places[-1]] = _stacks(columns, group, plan)
                stacked = stacked or [0] * batch.count
                # At the place of the last one: a stack must not be delivered before a message that was
                # emitted before its last row.
                stacked[places[-1]] = group.count
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

    def _decode_alike(self, columns: BatchColumns, group: native.Group, plan: Plan) -> DecodedBatch:
        # The whole batch is of one kind, as the messages of a scan with one tap are.
        nbytes = group.count * plan.nbytes
        first_time_ns = columns.numbers(0)[3]
        consumer_id, flags, seq, time_ns, run_id = columns.numbers(group.count - 1)
        if flags & _BATCHED:
            item = (consumer_id, flags, seq, time_ns, run_id, group.count, _stacks(columns, group, plan))
            return DecodedBatch([item], nbytes, first_time_ns, seq, stacked=True)
        *numbers, _ = columns.lists()
        items = zip(*numbers, repeat(0), _unstack(columns, group, plan))
        return DecodedBatch(items, nbytes, first_time_ns, seq, stacked=False)

    def _plan_for(self, columns: BatchColumns, group: native.Group) -> Plan | None:
        # None has the messages decoded one by one, which reports each invalid one.
        if group.count < MIN_ALIKE:
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


def seq_of(frame: Frame) -> int:
    """Sequence number of a frame, whose other parts may be damaged; -1 if its header cannot be decoded."""
    memory, offset, _ = frame
    try:
        return decode_header(memory, offset).seq
    except WireError:
        return -1


def _stride(plan: Plan) -> int:
    # With a single array no padding is needed to align the next one.
    return plan.payload_bytes if len(plan.entries) == 1 else (plan.payload_bytes + 7) & -8


def _stacks(columns: BatchColumns, group: native.Group, plan: Plan) -> list[Array]:
    stride = _stride(plan)
    views = plan.views(columns.stack(group.first, group.count, stride), group.count, stride)
    # Several arrays are copied, so that a consumer that keeps one of them does not keep the memory of all.
    return views if len(views) == 1 else [view.copy() for view in views]


def _unstack(columns: BatchColumns, group: native.Group, plan: Plan) -> Iterator[tuple[Array, ...]]:
    # Copies everything at once: the batch's memory is released before its messages are delivered.
    stride = _stride(plan)
    at_once = max(1, CHUNK_BYTES // stride) if stride else group.count
    rows: list[list[Array]] = [[] for _ in plan.entries]
    for done in range(0, group.count, at_once):
        count = min(at_once, group.count - done)
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
