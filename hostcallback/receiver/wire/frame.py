"""Frames: their header (the first 64 bytes) with its flags, and the encoding of whole frames."""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import CorruptFrameError, TruncatedFrameError, UnsupportedVersionError
from hostcallback.receiver.wire import array_types

MAGIC = b"HCB"
VERSION = 1

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
    """Of consecutive failures of this check, only the first ones and the last need be read."""
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

_EVERYWHERE = int(EVERYWHERE)

PREFIX_ONLY = Flags.LATE | Flags.LAST
"""The flags that only the native handlers read, in the prefix of a tap."""

NO_MESSAGE = Flags.PAD | Flags.DISCARDED | Flags.BUSY
_UNKNOWN = 0xFFFFFFFF & ~int(EVERYWHERE | Flags.EXTERNAL | NO_MESSAGE)


def align(nbytes: int) -> int:
    """Rounds up to a multiple of `ALIGNMENT`."""
    return (nbytes + array_types.ALIGNMENT - 1) & -array_types.ALIGNMENT


class Header(NamedTuple):
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
            return self.payload_start + array_types.ALIGNMENT
        return self.payload_start + align(self.payload_bytes)


def encode_header(header: Header) -> bytes:
    """Encodes a header as 64 bytes, ring-only flags included.

    Raises:
        ValueError: a number is out of its range.
    """
    try:
        return HEADER.pack(MAGIC, VERSION, *header)
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


def read_metadata(buffer: Buffer, offset: int, header: Header) -> bytes:
    """Reads the metadata, without their padding.

    Raises:
        WireError: the padding is not zero, or the buffer ends too early.
    """
    view = memoryview(buffer)
    if view.nbytes - offset < header.payload_start:
        raise truncated(offset, "its metadata", header.payload_start, view.nbytes - offset)
    start = offset + HEADER.size
    end = start + header.meta_bytes
    if any(view[end : offset + header.payload_start].tobytes()):
        raise CorruptFrameError(
            f"the metadata of the frame at offset {offset} end in nonzero padding, expected zeros after "
            f"{header.meta_bytes} bytes; it was overwritten: discard it"
        )
    return view[start:end].tobytes()


def encode_prefix(
    consumer_id: int, flags: Flags | int, specs: Iterable[array_types.ArraySpec], predicate: int = 0
) -> bytes:
    """Encodes the common beginning of all frames of one tap: header and padded metadata.

    The header has consumer id, flags and meta_bytes; an emission fills in the rest, see `frame_from_prefix`. Until then
    the device field holds `predicate`: the index of a check's predicate among the arrays.

    Raises:
        ValueError: a number is out of its range, or a flag is ring only.
    """
    metadata = array_types.encode_metadata(specs)
    header = Header(_public(flags, PREFIX_ONLY), consumer_id, 0, 0, 0, predicate, len(metadata), 0, 0)
    return encode_header(header) + metadata.ljust(align(len(metadata)), b"\0")


def frame_from_prefix(
    prefix: bytes,
    arrays: Sequence[array_types.Array],
    *,
    seq: int = 0,
    time_ns: int = 0,
    run_id: int = 0,
    device: int = 0,
    position: int = 0,
) -> bytes:
    """Encodes one frame from a prefix and arrays, as the native encoder does. Any thread; copies the arrays.

    Raises:
        ValueError: the arrays' shapes or dtypes differ from the prefix's, or a number is out of its range.
        WireError: `prefix` is not from `encode_prefix`.
    """
    flags, consumer_id, meta_bytes, specs, offsets, payload_bytes = _parse_prefix(prefix)
    header = Header(flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, position)
    pieces: list[Any] = [encode_header(header), prefix[HEADER.size :]]
    if len(arrays) != len(specs):
        raise ValueError(f"{len(arrays)} arrays for a prefix that announces {len(specs)}")
    end = 0
    for array, spec, offset in zip(arrays, specs, offsets, strict=True):
        array = np.asarray(array)
        # Dtypes are usually equal; the wire type is looked up only if the byte order differs.
        if array.shape != spec.shape or (
            array.dtype != spec.dtype and array_types.wire_type_of(array.dtype).code != spec.type_code
        ):
            raise ValueError(
                f"array {array.dtype}{list(array.shape)} where the prefix announces "
                f"{spec.dtype}{list(spec.shape)}; pass the arrays that the prefix was made for"
            )
        raw = _wire_bytes(array, spec)
        pieces += (bytes(offset - end), raw)
        end = offset + raw.size
    pieces.append(bytes(align(payload_bytes) - end))
    return b"".join(pieces)


def encode_frame(
    arrays: Iterable[array_types.Array],
    *,
    consumer_id: int,
    flags: Flags | int = 0,
    **stamp: int,
) -> bytes:
    """Encodes one frame. Arrays may have any byte order and strides; the frame has them in C order, little-endian.

    `stamp` is as in `frame_from_prefix`.

    Raises:
        TypeError: the wire format has no such dtype.
        ValueError: a number is out of its range, or a flag is ring only.
    """
    arrays = [np.asarray(array) for array in arrays]
    prefix = encode_prefix(consumer_id, flags, [array_types.ArraySpec.of(a.dtype, a.shape) for a in arrays])
    return frame_from_prefix(prefix, arrays, **stamp)


def _wire_bytes(array: array_types.Array, spec: array_types.ArraySpec) -> array_types.Array:
    # uint8, shape [spec.nbytes]; a view if the memory already has the wire's form.
    if spec.bits < 8:
        return array_types.pack_subbyte(array)
    return np.ascontiguousarray(array, spec.dtype).reshape(-1).view(np.uint8)


# Cached, because a tap emits the same prefix repeatedly.
@functools.lru_cache(maxsize=256)
def _parse_prefix(
    prefix: bytes,
) -> tuple[Flags, int, int, tuple[array_types.ArraySpec, ...], list[int], int]:
    header = decode_header(prefix)
    if len(prefix) != header.payload_start:
        raise CorruptFrameError(
            f"the prefix has {len(prefix)} bytes, expected {header.payload_start} for the metadata length "
            "in its header; make it with encode_prefix"
        )
    specs = array_types.decode_metadata(read_metadata(prefix, 0, header))
    offsets, _, payload_bytes = array_types.payload_layout(specs)
    return header.flags, header.consumer_id, header.meta_bytes, specs, offsets, payload_bytes


def _public(flags: Flags | int, more: int = 0) -> Flags:
    if int(flags) & ~(_EVERYWHERE | int(more)):
        raise ValueError(
            f"flags {int(flags):#x}, expected a combination of {EVERYWHERE!r}; only a ring sets the others"
        )
    return Flags(flags)
