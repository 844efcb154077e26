"""The unwritten messages of one device, in memory that is reused."""

from __future__ import annotations

import numpy as np

from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.wire.dtypes import Array

MEMORY_BYTES = 512 << 10
"""Room for two reads of a device that sends at full speed. Messages that do not fit get new memory."""


class WriteBuffer:
    """The unwritten messages of one device. Its owner's lock protects it.

    Attributes:
        nbytes: of the messages.
        step: of the last written message.
    """

    def __init__(self) -> None:
        """The buffer is empty."""
        self.nbytes = 0
        self.step = NO_STEP
        self._memory = np.empty(0, np.uint8)
        self._used = 0
        self._blocks: list[FrameBlock] = []
        self._folded: list[tuple[int, int]] = []

    def room(self, nbytes: int) -> Array:
        """Memory for the next block, uint8, shape (nbytes,): right after the earlier blocks if it fits, else new."""
        if not self._memory.size and nbytes > 1 << 12:
            self._memory = np.empty(MEMORY_BYTES, np.uint8)
        end = self._used + nbytes
        if end > self._memory.size:
            return np.empty(nbytes, np.uint8)
        return self._memory[self._used : end]

    def add(self, block: FrameBlock, folded: list[tuple[int, int]]) -> None:
        """Adds messages, and the counts of failures of the same check that were left out before some of them."""
        if block.data.base is self._memory:
            self._used += block.data.size
        self._blocks.append(block)
        self._folded += folded
        self.nbytes += block.data.size

    def take(self) -> tuple[FrameBlock, list[tuple[int, int]]] | None:
        """Returns all messages; None if there are none. The block is valid until the next one is added."""
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
