"""One read of a ring: its frames and payloads; the sizes of a ring, and its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver import environment
from hostcallback.receiver.errors import LostMessagesError
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.columns import BatchColumns
from hostcallback.receiver.sources.source import Frame
from hostcallback.receiver.wire import CorruptStreamError


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
