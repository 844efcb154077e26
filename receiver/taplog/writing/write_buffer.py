"""The messages of one device that have come and are not written, in memory that is used again and again."""

from __future__ import annotations

import numpy as np

from receiver.taplog.format.block import FrameBlock
from receiver.taplog.format.layout import NO_STEP
from receiver.wire.dtypes import Array

MEMORY_BYTES = 512 << 10
"""Two reads of a device that sends as fast as it can. What does not fit gets memory of its own."""


class WriteBuffer:
    """One device's. Whoever owns it holds its lock.

    Attributes:
        nbytes: of the messages.
        step: that the last message that was written belongs to.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.nbytes = 0
        self.step = NO_STEP
        self._memory = np.empty(0, np.uint8)
        self._used = 0
        self._blocks: list[FrameBlock] = []
        self._folded: list[tuple[int, int]] = []

    def room(self, nbytes: int) -> Array:
        """Memory for the next block; that of the blocks before it if there is enough, right behind them."""
        if not self._memory.size and nbytes > 1 << 12:
            self._memory = np.empty(MEMORY_BYTES, np.uint8)
        end = self._used + nbytes
        if end > self._memory.size:
            return np.empty(nbytes, np.uint8)
        return self._memory[self._used : end]

    def add(self, block: FrameBlock, folded: list[tuple[int, int]]) -> None:
        """Adds messages, and how many failures of the same check were left out before some of them."""
        if block.data.base is self._memory:
            self._used += block.data.size
        self._blocks.append(block)
        self._folded += folded
        self.nbytes += block.data.size

    def take(self) -> tuple[FrameBlock, list[tuple[int, int]]] | None:
        """All of it, if there is any. The block is good until the next one is added."""
        if not self._blocks:
            return None
        blocks, folded = self._blocks, self._folded
        if self._used == self.nbytes:
            starts = np.cumsum([0, *(block.data.size for block in blocks[:-1])])
            offsets = [block.offsets + start for block, start in zip(blocks, starts, strict=True)]
            whole = FrameBlock(self._memory[: self._used], np.concatenate(offsets))
        else:
            whole = FrameBlock.join(blocks)
        self._blocks, self._folded = [], []
        self._used = self.nbytes = 0
        return whole, folded
