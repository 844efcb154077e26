"""Errors of a ring: damaged memory, and copies that a GPU's driver failed to make."""

from __future__ import annotations

from hostcallback.receiver.errors import LostMessagesError
from hostcallback.receiver.wire import CorruptStreamError

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
