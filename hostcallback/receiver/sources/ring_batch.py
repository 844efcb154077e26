"""The result of one read of a ring: its frames, and their payloads outside the ring."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hostcallback.receiver.sources.columns import BatchColumns
from hostcallback.receiver.sources.source import Frame


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
