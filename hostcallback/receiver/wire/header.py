"""The header of a frame, its first 64 bytes, and its flags; errors of frames that cannot be decoded.

WireError                   a frame cannot be decoded
|-- TruncatedFrameError     it continues beyond the end of the buffer
|-- CorruptFrameError       its bytes contradict the format or each other
|-- UnsupportedVersionError its writer was newer
|-- UnsupportedDtypeError   it has a dtype that this installation lacks
`-- CorruptStreamError      a stretch of a stream holds no frames
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.errors import HostCallbackError


class WireError(HostCallbackError):
    """A frame cannot be decoded. Only subclasses are raised."""


class TruncatedFrameError(WireError):
    """The frame continues beyond the end of the buffer."""


class CorruptFrameError(WireError):
    """The bytes contradict the format or each other."""


class UnsupportedVersionError(WireError):
    """The frame is of a newer wire format than this package reads."""


class UnsupportedDtypeError(WireError):
    """The frame contains an array of a dtype that this installation does not have."""


class CorruptStreamError(WireError):
    """A stretch of a stream holds no frames; the stream continues after it.

    Attributes:
        skipped: number of messages in that stretch.
    """

    def __init__(self, message: str, skipped: int = 0) -> None:
        """`skipped` is the number of lost messages."""
        super().__init__(message)
        self.skipped = skipped


MAGIC = b"HCB"
VERSION = 1
ALIGNMENT = 64

HEADER = struct.Struct("<3sBIQQqqiIQQ")
"""magic, version, flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, position."""

Buffer = Any
"""An object of the buffer protocol whose items are bytes (collections.abc.Buffer is Python 3.12's)."""


class Flags(enum.IntFlag):
    """Header flags. Flags marked "ring only" never leave the transport's memory."""

    ORDERED = 1 << 0
    """Emitted in program order with the device's other ordered messages."""
    END_OF_STREAM = 1 << 1
    """The end of a stream: consumer_id is its sender's token, and there are no arrays."""
    EXTERNAL = 1 << 2
    """Ring only: a 64-byte descriptor {address, nbytes} replaces the payload."""
    PAD = 1 << 3
    """Ring only: not a message, but the unused end of the ring."""
    CALL = 1 << 5
    """A program waits for the reply to this message."""
    CHECK = 1 << 6
    """A failed check."""
    FOLDS = 1 << 7
    """Of consecutive failures of this check, only the first and the last need be read."""
    BATCHED = 1 << 8
    """Its consumer takes stacks of its messages."""
    TRUNCATED = 1 << 9
    """Only the first elements of its arrays; the first array is a shape record, see `wire.truncation`."""
    LATE = 1 << 10
    """Prefix only: it is emitted although a check has ended its launch (`on_error="abort"`)."""
    LAST = 1 << 11
    """Prefix only: as LATE, and then the launch ends."""
    DISCARDED = 1 << 30
    """Ring only: not a message; reserved and given up."""
    BUSY = 1 << 31
    """Ring only: still being written."""


EVERYWHERE = (
    Flags.ORDERED
    | Flags.END_OF_STREAM
    | Flags.CALL
    | Flags.CHECK
    | Flags.FOLDS
    | Flags.BATCHED
    | Flags.TRUNCATED
)
"""The flags that may be set outside a ring."""

PREFIX_ONLY = Flags.LATE | Flags.LAST
"""The flags that only the native handlers read, in the prefix of a tap."""

NO_MESSAGE = Flags.PAD | Flags.DISCARDED | Flags.BUSY
_UNKNOWN = 0xFFFFFFFF & ~int(EVERYWHERE | Flags.EXTERNAL | NO_MESSAGE)


def align(nbytes: int) -> int:
    """Rounds up to a multiple of `ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame, without magic and version.

    Attributes:
        flags: see `Flags`.
        consumer_id: id of the message's consumer; at the end of a stream, its sender's token.
        seq: number of the message on its device, counting dropped ones.
        time_ns: Unix time of the emission in nanoseconds.
        run_id: equal on all devices of one launch of one program.
        device: id of the emitting device.
        meta_bytes: exact length of the metadata.
        payload_bytes: exact length of the payload, without the padding after it.
        position: of the frame's first byte in its stream.
    """

    flags: Flags
    consumer_id: int
    seq: int
    time_ns: int
    run_id: int
    device: int
    meta_bytes: int
    payload_bytes: int
    position: int

    @property
    def payload_start(self) -> int:
        """Offset of the payload from the frame's first byte."""
        return HEADER.size + align(self.meta_bytes)

    @property
    def frame_bytes(self) -> int:
        """Bytes from this frame's start to the next one's."""
        if self.flags & Flags.EXTERNAL:
            return self.payload_start + ALIGNMENT
        return self.payload_start + align(self.payload_bytes)


def encode_header(header: Header) -> bytes:
    """Encodes a header as 64 bytes, ring-only flags included.

    Raises:
        ValueError: a number is out of its range.
    """
    try:
        return HEADER.pack(
            MAGIC,
            VERSION,
            header.flags,
            header.consumer_id,
            header.seq,
            header.time_ns,
            header.run_id,
            header.device,
            header.meta_bytes,
            header.payload_bytes,
            header.position,
        )
    except struct.error as error:
        raise ValueError(
            f"{header} does not fit: {error}; expected unsigned 64 bits for consumer_id, seq and position, "
            "signed 64 for time_ns and run_id, signed 32 for device"
        ) from error


def decode_header(buffer: Buffer, offset: int = 0) -> Header:
    """Decodes the header at `offset`; only its 64 bytes need to exist. Ring-only flags are accepted.

    Raises:
        TruncatedFrameError: the buffer ends before the header does.
        CorruptFrameError: wrong magic, version 0, or an unknown flag.
        UnsupportedVersionError: the frame is of a newer format.
        ValueError: `offset` is negative.
    """
    if offset < 0:
        raise ValueError(f"offset {offset}, expected 0 or more")
    available = memoryview(buffer).nbytes - offset
    if available < HEADER.size:
        raise truncated(offset, "its header", HEADER.size, available)
    magic, version, flags, *fields = HEADER.unpack_from(buffer, offset)
    if magic != MAGIC:
        raise CorruptFrameError(
            f"the bytes at offset {offset} start with {magic!r}, expected {MAGIC!r}; this is not the start "
            "of a frame, or it was overwritten: go on at a frame whose position is known"
        )
    if version > VERSION:
        raise UnsupportedVersionError(
            f"the frame at offset {offset} is of wire format {version}, this package reads up to {VERSION}; "
            "upgrade hostcallback where the frame is read"
        )
    if version < 1:
        raise CorruptFrameError(
            f"the frame at offset {offset} says wire format {version}, expected 1 to {VERSION}; "
            "it was overwritten: discard it"
        )
    if flags & _UNKNOWN:
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {flags:#x}, of which wire format {version} does not "
            f"know {flags & _UNKNOWN:#x}; it was overwritten: discard it"
        )
    return Header(Flags(flags), *fields)


def truncated(offset: int, what: str, needed: int, available: int) -> TruncatedFrameError:
    """The error for a buffer that ends too early."""
    return TruncatedFrameError(
        f"the buffer has {max(available, 0)} bytes from offset {offset} on, where {what} needs {needed}; "
        "read more before decoding or, at the end of the stream, drop this frame"
    )
