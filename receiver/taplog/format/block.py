"""Frames that follow each other in memory, all inline, and their headers as columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from receiver.wire import HEADER

Array = np.ndarray[Any, Any]


class FrameBlock:
    """Frames of one device, one behind the other from offset 0 on.

    Attributes:
        data: the bytes, uint8; aligned to 8.
        offsets: where each frame begins in them, int64.
    """

    def __init__(self, data: Array, offsets: Array) -> None:
        """Takes both over."""
        self.data = data
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def join(cls, blocks: Sequence[FrameBlock]) -> FrameBlock:
        """One block of all of them, in order."""
        if len(blocks) == 1:
            return blocks[0]
        starts = np.cumsum([0, *(block.data.size for block in blocks[:-1])])
        offsets = [block.offsets + start for block, start in zip(blocks, starts, strict=True)]
        return cls(np.concatenate([block.data for block in blocks]), np.concatenate(offsets))

    def part(self, start: int, stop: int) -> FrameBlock:
        """The frames from index `start` up to `stop`; their memory is shared."""
        if start == 0 and stop == len(self):
            return self
        first = int(self.offsets[start]) if start < len(self) else self.data.size
        last = int(self.offsets[stop]) if stop < len(self) else self.data.size
        return FrameBlock(self.data[first:last], self.offsets[start:stop] - first)

    def chosen(self, mask: Array) -> FrameBlock:
        """The frames at which `mask` is true; their memory is shared."""
        return self if mask.all() else FrameBlock(self.data, self.offsets[mask])

    def taken_out(self, mask: Array) -> FrameBlock:
        """The frames at which `mask`, true somewhere, is true; in memory of their own."""
        return FrameBlock.join([self.part(place, place + 1) for place in np.flatnonzero(mask).tolist()])

    @cached_property
    def _words(self) -> Any:
        return self.data.view("<u8")

    @cached_property
    def _at(self) -> Array:
        return self.offsets >> 3

    @cached_property
    def starts(self) -> list[int]:
        """The offsets, as a list."""
        found: list[int] = self.offsets.tolist()
        return found

    @cached_property
    def times(self) -> list[int]:
        """The times, as a list."""
        found: list[int] = self.times_ns.tolist()
        return found

    @cached_property
    def flags(self) -> Array:
        """uint64, of each frame."""
        column: Array = self._words[self._at] >> np.uint64(32)
        return column

    @cached_property
    def consumer_ids(self) -> Array:
        """uint64, of each frame."""
        column: Array = self._words[self._at + 1]
        return column

    @cached_property
    def consumers(self) -> list[int]:
        """The consumer ids, each once."""
        ids = self.consumer_ids
        return [int(ids[0])] if (ids == ids[0]).all() else list(set(ids.tolist()))

    @cached_property
    def seqs(self) -> Array:
        """uint64, of each frame."""
        column: Array = self._words[self._at + 2]
        return column

    @cached_property
    def times_ns(self) -> Array:
        """int64, of each frame."""
        column: Array = self._words[self._at + 3].view("<i8")
        return column

    @cached_property
    def meta_bytes(self) -> Array:
        """uint64, of each frame."""
        column: Array = self._words[self._at + 5] >> np.uint64(32)
        return column

    @cached_property
    def payload_bytes(self) -> Array:
        """uint64, of each frame."""
        column: Array = self._words[self._at + 6]
        return column

    def without_flags(self, flags: int) -> FrameBlock:
        """The same frames without some flags; a copy if any has them."""
        unwanted = np.uint64(flags << 32)
        if not (self._words[self._at] & unwanted).any():
            return self
        block = FrameBlock(self.data.copy(), self.offsets)
        block._words[self._at] &= ~unwanted
        return block

    def set_positions(self) -> None:
        """Makes every frame's `position` its offset in this block."""
        self._words[self._at + 7] = self.offsets

    def metadata(self, index: int) -> bytes:
        """Of one frame, without padding."""
        start = int(self.offsets[index]) + HEADER.size
        return self.data[start : start + int(self.meta_bytes[index])].tobytes()
