"""Frames that follow each other in memory, and their header fields as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.frame import HEADER

FEW = 64
"""Fewer frames are looked at one by one, which takes less time than a call of numpy."""


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
        if len(ids) > FEW and (ids == ids[0]).all():
            return [int(ids[0])]
        return list(set(ids.tolist()))

    @cached_property
    def seqs(self) -> Array:
        """Sequence number of each frame, uint64."""
        return self._field(2)

    @cached_property
    def times_ns(self) -> Array:
        """Emission time of each frame in Unix nanoseconds, int64."""
        return self._field(3).view("<i8")

    @cached_property
    def launches(self) -> Array:
        """Launch of each frame's program, int64: equal on all devices that take part in it."""
        return self._field(4).view("<i8")

    @cached_property
    def meta_bytes(self) -> Array:
        """Length of each frame's metadata, uint64."""
        return self._field(5) >> np.uint64(32)

    @cached_property
    def payload_bytes(self) -> Array:
        """Length of each frame's payload, uint64."""
        return self._field(6)

    @cached_property
    def alike(self) -> list[Array]:
        """The places of all frames, those with equal metadata together; see `alike_groups`."""
        return list(_alike_groups(self, np.arange(len(self))))

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


def alike_groups(block: FrameBlock, places: Array) -> Iterable[Array]:
    """The ascending places of messages, those with equal metadata and lengths together."""
    return block.alike if len(places) == len(block) else _alike_groups(block, places)


def _alike_groups(block: FrameBlock, places: Array) -> Iterator[Array]:
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
    return step if step > 0 and (offsets[1:] - offsets[:-1] == step).all() else 0
