"""The layout of a frame: its header (the first 64 bytes), flags, and dtypes; errors of frames that cannot be decoded.

WireError                   a frame cannot be decoded
|-- TruncatedFrameError     it continues beyond the end of the buffer
|-- CorruptFrameError       its bytes contradict the format or each other
|-- UnsupportedVersionError its writer was newer
|-- UnsupportedDtypeError   it has a dtype that this installation lacks
`-- CorruptStreamError      a stretch of a stream holds no frames
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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
            return self.payload_start + ALIGNMENT
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


Array = np.ndarray[Any, np.dtype[Any]]
Dtype = np.dtype[Any]


class WireType(NamedTuple):
    """One dtype of the wire format.

    Attributes:
        code: number in metadata; equal to XLA's PrimitiveType (openxla/xla, xla/xla_data.proto).
        xla_name: XLA's name.
        name: numpy's name, or ml_dtypes' if numpy has no such dtype.
        bits: of one element on the wire; in memory numpy uses at least a byte per element.
    """

    code: int
    xla_name: str
    name: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element in numpy's memory."""
        return max(self.bits // 8, 1)


WIRE_TYPES = (
    WireType(1, "PRED", "bool", 8),
    WireType(2, "S8", "int8", 8),
    WireType(3, "S16", "int16", 16),
    WireType(4, "S32", "int32", 32),
    WireType(5, "S64", "int64", 64),
    WireType(6, "U8", "uint8", 8),
    WireType(7, "U16", "uint16", 16),
    WireType(8, "U32", "uint32", 32),
    WireType(9, "U64", "uint64", 64),
    WireType(10, "F16", "float16", 16),
    WireType(11, "F32", "float32", 32),
    WireType(12, "F64", "float64", 64),
    WireType(15, "C64", "complex64", 64),
    WireType(16, "BF16", "bfloat16", 16),
    WireType(18, "C128", "complex128", 128),
    WireType(19, "F8E5M2", "float8_e5m2", 8),
    WireType(20, "F8E4M3FN", "float8_e4m3fn", 8),
    WireType(21, "S4", "int4", 4),
    WireType(22, "U4", "uint4", 4),
    WireType(23, "F8E4M3B11FNUZ", "float8_e4m3b11fnuz", 8),
    WireType(24, "F8E5M2FNUZ", "float8_e5m2fnuz", 8),
    WireType(25, "F8E4M3FNUZ", "float8_e4m3fnuz", 8),
    WireType(26, "S2", "int2", 2),
    WireType(27, "U2", "uint2", 2),
    WireType(28, "F8E4M3", "float8_e4m3", 8),
    WireType(29, "F8E3M4", "float8_e3m4", 8),
    WireType(30, "S1", "int1", 1),
    WireType(31, "U1", "uint1", 1),
    WireType(32, "F4E2M1FN", "float4_e2m1fn", 4),
    WireType(33, "F8E8M0FNU", "float8_e8m0fnu", 8),
)

BY_CODE = {wire_type.code: wire_type for wire_type in WIRE_TYPES}
BY_NAME = {wire_type.name: wire_type for wire_type in WIRE_TYPES}

_UINT8 = np.dtype(np.uint8)


def wire_type_of(dtype: Dtype) -> WireType:
    """The wire type of a numpy dtype of any byte order.

    Raises:
        TypeError: the wire format has no such type.
    """
    try:
        return BY_NAME[dtype.name]
    except KeyError:
        raise TypeError(
            f"an array of dtype {dtype} cannot be sent; expected one of {', '.join(BY_NAME)}; "
            "convert the array to one of these first"
        ) from None


@functools.lru_cache(maxsize=len(WIRE_TYPES))
def dtype_of(code: int) -> Dtype:
    """The numpy dtype of a type code, little-endian.

    Raises:
        KeyError: no such type code exists.
        ImportError: the dtype is from ml_dtypes, which is missing or too old.
    """
    name = BY_CODE[code].name
    if hasattr(np, name):
        return np.dtype(name).newbyteorder("<")
    return _ml_dtype(name)


def _ml_dtype(name: str) -> Dtype:
    # Imported on demand: a collector of plain float32 metrics runs without ml_dtypes.
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"an array of dtype {name} needs the package ml_dtypes, which is not installed: "
            "pip install ml_dtypes"
        ) from error
    try:
        dtype: Dtype = np.dtype(getattr(ml_dtypes, name))
    except AttributeError as error:
        raise ImportError(
            f"an array of dtype {name} needs a newer ml_dtypes than the installed "
            f"{ml_dtypes.__version__}: pip install --upgrade ml_dtypes"
        ) from error
    return dtype


@functools.lru_cache(maxsize=64)
def is_subbyte(dtype: Dtype) -> bool:
    """Whether the wire, and XLA, pack several elements of this dtype into a byte."""
    return wire_type_of(dtype).bits < 8


def pack_subbyte(array: Array) -> Array:
    """Packs elements narrower than a byte, in C order, element 0 in the low bits of byte 0.

    Args:
        array: of a dtype with fewer than 8 bits, any shape.

    Returns:
        uint8, shape [ceil(size * bits / 8)]; the bits beyond the last element are zero.
    """
    bits = wire_type_of(array.dtype).bits
    per_byte = 8 // bits
    elements = np.ascontiguousarray(array).reshape(-1).view(_UINT8)
    padded = np.zeros(-(-elements.size // per_byte) * per_byte, _UINT8)
    np.bitwise_and(elements, (1 << bits) - 1, out=padded[: elements.size])
    columns = padded.reshape(-1, per_byte)
    packed = columns[:, 0].copy()
    for k in range(1, per_byte):
        packed |= columns[:, k] << np.uint8(k * bits)
    return packed


def unpack_subbyte(buffer: Any, dtype: Dtype, shape: Sequence[int]) -> Array:
    """Reverses `pack_subbyte`.

    Args:
        buffer: at least ceil(product(shape) * bits / 8) bytes; bits beyond the last element are ignored.
        dtype: of fewer than 8 bits.
        shape: of the result.

    Returns:
        A new array that owns its memory, one byte per element.
    """
    bits = wire_type_of(dtype).bits
    size = math.prod(shape)
    packed = np.frombuffer(buffer, _UINT8, count=-(-size * bits // 8))
    out = np.empty(tuple(shape), dtype)
    out.reshape(-1).view(_UINT8)[:] = _unpacked_bytes(dtype)[packed].reshape(-1)[:size]
    return out


@functools.lru_cache(maxsize=16)
def _unpacked_bytes(dtype: Dtype) -> Array:
    # uint8, shape [256, elements per byte]: the elements in memory of each packed byte. Only ml_dtypes knows how
    # it stores a negative int4 (with or without its sign extended), so it converts each value once.
    wire_type = wire_type_of(dtype)
    bits = wire_type.bits
    codes = np.arange(1 << bits, dtype=np.uint8)
    if wire_type.name.startswith("int"):
        values = codes.astype(np.int16)
        values[values >= 1 << (bits - 1)] -= 1 << bits
        stored = values.astype(dtype).view(_UINT8)
    else:
        stored = codes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    table: Array = stored[(np.arange(256, dtype=np.uint8)[:, None] >> shifts) & ((1 << bits) - 1)]
    return table
