"""Frames that follow each other in memory, their header fields as columns, and the steps of their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages import StepSource, step_place
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.taplog.format.layout import NO_STEP, align
from hostcallback.receiver.wire import HEADER, Flags, WireError, decode_metadata, payload_layout
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class FrameBlock:
    """Frames of one device that follow each other from offset 0 on.

    Attributes:
        data: the bytes, uint8, aligned to 8.
        offsets: start of each frame in `data`, int64, shape (frames,).
    """

    def __init__(self, data: Array, offsets: Array) -> None:
        """Takes ownership of both arrays."""
        self.data = data
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def join(cls, blocks: Sequence[FrameBlock]) -> FrameBlock:
        """Joins blocks into one, in order."""
        if len(blocks) == 1:
            return blocks[0]
        starts = np.cumsum([0, *(block.data.size for block in blocks[:-1])])
        offsets = [block.offsets + start for block, start in zip(blocks, starts, strict=True)]
        return cls(np.concatenate([block.data for block in blocks]), np.concatenate(offsets))

    def part(self, start: int, stop: int) -> FrameBlock:
        """The frames with indices in [start, stop); memory is shared."""
        if start == 0 and stop == len(self):
            return self
        first = int(self.offsets[start]) if start < len(self) else self.data.size
        last = int(self.offsets[stop]) if stop < len(self) else self.data.size
        return FrameBlock(self.data[first:last], self.offsets[start:stop] - first)

    def chosen(self, mask: Array) -> FrameBlock:
        """The frames where `mask` (bool, one per frame) is true; memory is shared."""
        return self if mask.all() else FrameBlock(self.data, self.offsets[mask])

    def taken_out(self, mask: Array) -> FrameBlock:
        """Copies the frames where `mask` is true; it must be true for at least one."""
        return FrameBlock.join([self.part(place, place + 1) for place in np.flatnonzero(mask).tolist()])

    @cached_property
    def _words(self) -> Any:
        return self.data.view("<u8")

    @cached_property
    def _at(self) -> Array:
        return self.offsets >> 3

    def _field(self, word: int) -> Array:
        # A word of each frame's header.
        field: Array = self._words[self._at + word]
        return field

    @cached_property
    def starts(self) -> list[int]:
        """The offsets as a list."""
        found: list[int] = self.offsets.tolist()
        return found

    @cached_property
    def times(self) -> list[int]:
        """Emission times in Unix nanoseconds, as a list."""
        found: list[int] = self.times_ns.tolist()
        return found

    @cached_property
    def flags(self) -> Array:
        """Flags of each frame, uint64."""
        return self._field(0) >> np.uint64(32)

    @cached_property
    def consumer_ids(self) -> Array:
        """Consumer id of each frame, uint64."""
        return self._field(1)

    @cached_property
    def consumers(self) -> list[int]:
        """The distinct consumer ids."""
        ids = self.consumer_ids
        return [int(ids[0])] if (ids == ids[0]).all() else list(set(ids.tolist()))

    @cached_property
    def seqs(self) -> Array:
        """Sequence number of each frame, uint64."""
        return self._field(2)

    @cached_property
    def times_ns(self) -> Array:
        """Emission time of each frame in Unix nanoseconds, int64."""
        return self._field(3).view("<i8")

    @cached_property
    def run_ids(self) -> Array:
        """Launch of the program of each frame, int64."""
        return self._field(4).view("<i8")

    @cached_property
    def meta_bytes(self) -> Array:
        """Length of each frame's metadata, uint64."""
        return self._field(5) >> np.uint64(32)

    @cached_property
    def payload_bytes(self) -> Array:
        """Length of each frame's payload, uint64."""
        return self._field(6)

    def without_flags(self, flags: int) -> FrameBlock:
        """Clears `flags` in all frames; copies the block if any frame has one of them."""
        unwanted = np.uint64(flags << 32)
        if not (self._words[self._at] & unwanted).any():
            return self
        block = FrameBlock(self.data.copy(), self.offsets)
        block._words[self._at] &= ~unwanted
        return block

    def set_positions(self) -> None:
        """Sets every frame's `position` to its offset in this block."""
        self._words[self._at + 7] = self.offsets

    def metadata(self, index: int) -> bytes:
        """Metadata of one frame, without padding."""
        start = int(self.offsets[index]) + HEADER.size
        return self.data[start : start + int(self.meta_bytes[index])].tobytes()


def alike_groups(block: FrameBlock, places: Array) -> Iterator[Array]:
    """Yields the places of messages with equal metadata, group by group."""
    while len(places):
        first = int(places[0])
        meta_bytes, payload_bytes = block.meta_bytes[first], block.payload_bytes[first]
        alike = (block.meta_bytes[places] == meta_bytes) & (block.payload_bytes[places] == payload_bytes)
        words = (int(meta_bytes) + 7) // 8
        metadata = words_of(block, places[alike], HEADER.size, words)
        same = metadata == metadata[0]
        if not same.all():
            alike[alike] = same.all(axis=1)
        yield places[alike]
        places = places[~alike]


def words_of(block: FrameBlock, places: Array, start: int, count: int) -> Array:
    """`count` words of each message, from byte `start` of the frame on: uint64, shape (messages, count)."""
    offsets = block.offsets[places]
    stride = even_stride(offsets)
    if stride:
        first = int(offsets[0]) + start
        view: Array = np.ndarray((len(places), count), np.uint64, block.data, first, (stride, 8))
        return view
    at = (offsets + start) >> 3
    words: Array = block.data.view(np.uint64)[at[:, np.newaxis] + np.arange(count)]
    return words


def even_stride(offsets: Array) -> int:
    """Distance in bytes between messages that follow each other evenly; 0 if they do not."""
    if len(offsets) < 2:
        return 64
    step = int(offsets[1] - offsets[0])
    return step if step > 0 and (np.diff(offsets) == step).all() else 0


MAX_KNOWN = 4096

INTEGER_CODES = range(2, 10)
"""The wire format's codes of integers of whole bytes, S8 to U64."""

_TRUNCATED = np.uint64(int(Flags.TRUNCATED))


class _Slot(NamedTuple):
    # Location of the step in a frame.
    offset: int
    dtype: np.dtype[Any]


class StepColumns:
    """Finds the steps of messages, and remembers each tap's. One thread at a time."""

    def __init__(self, described: Callable[[int], TapDescriptor | None]) -> None:
        """`described` returns the known descriptor of a consumer, or None."""
        self._described = described
        self._places: dict[int, tuple[StepSource | None, int]] = {}
        self._slots: dict[tuple[int, bytes], _Slot | None] = {}  # by array index and metadata
        self._exported: dict[bytes, StepSource | None] = {}

    def of(self, block: FrameBlock, before: int) -> Array:
        """The step of each message, int64, shape (frames,): its own or the previous message's; at first `before`."""
        count = len(block)
        steps = np.full(count, before, np.int64)
        own = np.zeros(count, np.bool_)
        for consumer_id in block.consumers:
            self._fill(block, consumer_id, steps, own)
        if not own.any():
            return steps
        last = np.maximum.accumulate(np.where(own, np.arange(count), -1))
        return np.where(last < 0, before, steps[last])

    def _fill(self, block: FrameBlock, consumer_id: int, steps: Array, own: Array) -> None:
        if consumer_id in (WHOLE_ID, SHARDS_ID):
            for index in np.flatnonzero(block.consumer_ids == consumer_id).tolist():
                step = self._of_exported(block, index, consumer_id == SHARDS_ID)
                if step != NO_STEP:
                    steps[index], own[index] = step, True
            return
        place, before = self._place(consumer_id)
        if place is None:
            return
        where = np.flatnonzero(block.consumer_ids == consumer_id)
        if place.array < 0:
            steps[where], own[where] = place.value, True
            return
        truncated = (block.flags[where] & _TRUNCATED) != 0
        # A truncated message has a shape record before its arrays.
        for part, first in ((where[~truncated], before), (where[truncated], before + 1)):
            for alike in alike_groups(block, part):
                slot = self._slot(block.metadata(int(alike[0])), place.array + first)
                if slot is not None:
                    steps[alike] = _read(block, alike, slot)
                    own[alike] = True

    def _place(self, consumer_id: int) -> tuple[StepSource | None, int]:
        # Also returns the number of arrays before the tapped ones.
        known = self._places.get(consumer_id)
        if known is None:
            described = self._described(consumer_id)
            if described is None:
                return None, 0
            known = self._places[consumer_id] = step_place(described), int(described.shards is not None)
        return known

    def _slot(self, metadata: bytes, array: int) -> _Slot | None:
        key = array, metadata
        if key not in self._slots:
            if len(self._slots) >= MAX_KNOWN:
                self._slots.clear()
            self._slots[key] = _slot(metadata, array)
        return self._slots[key]

    def _of_exported(self, block: FrameBlock, index: int, sharded: bool) -> int:
        metadata = block.metadata(index)
        try:
            specs = decode_metadata(metadata)
        except WireError:
            return NO_STEP
        if len(specs) <= sharded:
            return NO_STEP
        starts, sizes, _ = payload_layout(specs)
        payload = int(block.offsets[index]) + HEADER.size + align(len(metadata))
        start = payload + starts[sharded]
        description = block.data[start : start + sizes[sharded]].tobytes()
        if description not in self._exported:
            if len(self._exported) >= MAX_KNOWN:
                self._exported.clear()
            try:
                self._exported[description] = step_place(TapDescriptor.unpack(description))
            except ValueError:
                self._exported[description] = None
        place = self._exported[description]
        if place is None:
            return NO_STEP
        if place.array < 0:
            return place.value
        slot = _slot(metadata, place.array + 1 + sharded)
        return NO_STEP if slot is None else int(_read(block, np.array([index]), slot)[0])


def _slot(metadata: bytes, array: int) -> _Slot | None:
    try:
        specs = decode_metadata(metadata)
    except WireError:
        return None
    if array >= len(specs):
        return None
    spec = specs[array]
    if spec.shape or spec.type_code not in INTEGER_CODES:
        return None
    offsets, _, _ = payload_layout(specs)
    return _Slot(HEADER.size + align(len(metadata)) + offsets[array], spec.dtype)


def _read(block: FrameBlock, where: Array, slot: _Slot) -> Array:
    at = (block.offsets[where] + slot.offset) // slot.dtype.itemsize
    steps: Array = block.data.view(slot.dtype)[at].astype(np.int64)
    return steps
