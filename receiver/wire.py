"""The reference codec of the wire format that docs/wire-format.md specifies.

WireError                   a frame, or what is said to be one, cannot be decoded
|-- TruncatedFrameError     it goes on beyond the end of the buffer
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from receiver.dtypes import (
    BY_CODE,
    Array,
    Dtype,
    dtype_of,
    pack_subbyte,
    unpack_subbyte,
    wire_type_of,
)
from receiver.errors import HostCallbackError

__all__ = [
    "ALIGNMENT",
    "HEADER",
    "MAGIC",
    "MAX_RANK",
    "VERSION",
    "ArraySpec",
    "CorruptFrameError",
    "CorruptStreamError",
    "Decoded",
    "Decoder",
    "Flags",
    "Header",
    "Plan",
    "TruncatedFrameError",
    "UnsupportedDtypeError",
    "UnsupportedVersionError",
    "WireError",
    "decode_frame",
    "decode_header",
    "decode_metadata",
    "encode_frame",
    "encode_header",
    "encode_metadata",
    "encode_prefix",
    "frame_from_prefix",
    "pack_subbyte",
    "payload_layout",
    "unpack_subbyte",
]

MAGIC = b"HCB"
VERSION = 1
ALIGNMENT = 64
MAX_RANK = 64  # numpy's limit

HEADER = struct.Struct("<3sBIQQqqiIQQ")
"""magic, version, flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, position."""

Buffer = Any
"""An object of the buffer protocol whose items are bytes (collections.abc.Buffer is Python 3.12's)."""

Decoded = tuple[int, int, int, int, int, int, list[Array]]
"""consumer_id, flags, seq, time_ns, run_id, device, arrays."""


class WireError(HostCallbackError):
    """A frame cannot be decoded. Only subclasses are raised."""


class TruncatedFrameError(WireError):
    """The frame goes on beyond the end of the buffer."""


class CorruptFrameError(WireError):
    """The bytes contradict the format or each other."""


class UnsupportedVersionError(WireError):
    """The frame is of a newer wire format than this package reads."""


class UnsupportedDtypeError(WireError):
    """The frame holds an array of a dtype that this installation does not have."""


class CorruptStreamError(WireError):
    """A stretch of a stream holds no frames; the stream goes on behind it.

    Attributes:
        skipped: how many messages were in that stretch.
    """

    def __init__(self, message: str, skipped: int = 0) -> None:
        """`skipped` is how many messages were lost."""
        super().__init__(message)
        self.skipped = skipped


class Flags(enum.IntFlag):
    """Header flags. Those that say "ring only" are the transport's, and never leave its memory."""

    ORDERED = 1 << 0
    """Emitted in program order with the device's other ordered messages."""
    END_OF_STREAM = 1 << 1
    """The sentinel: consumer_id is its sender's token, there are no arrays."""
    EXTERNAL = 1 << 2
    """Ring only: a 64-byte descriptor {address, nbytes} stands for the payload."""
    PAD = 1 << 3
    """Ring only: no message, fills the ring's end."""
    CALL = 1 << 5
    """A program waits for the reply to this message."""
    CHECK = 1 << 6
    """A check that failed."""
    FOLDS = 1 << 7
    """Of this check's failures in a row only the first and the last need be read."""
    BATCHED = 1 << 8
    """Its consumer takes stacks of its messages."""
    TRUNCATED = 1 << 9
    """Of its arrays only the first elements; the first array is a shape record, see `receiver.heads`."""
    DISCARDED = 1 << 30
    """Ring only: no message, reserved and given up."""
    BUSY = 1 << 31
    """Ring only: still being written."""


_EVERYWHERE = (
    Flags.ORDERED
    | Flags.END_OF_STREAM
    | Flags.CALL
    | Flags.CHECK
    | Flags.FOLDS
    | Flags.BATCHED
    | Flags.TRUNCATED
)
_NO_MESSAGE = Flags.PAD | Flags.DISCARDED | Flags.BUSY
_UNKNOWN = 0xFFFFFFFF & ~int(_EVERYWHERE | Flags.EXTERNAL | _NO_MESSAGE)


def _align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's first 64 bytes, but for magic and version.

    Attributes:
        flags: see `Flags`.
        consumer_id: who the message is for; in a sentinel, its sender's token.
        seq: number of the message on its device, counting dropped ones.
        time_ns: Unix time of the emission in nanoseconds.
        run_id: equal on all devices of one launch of one program.
        device: id of the emitting device.
        meta_bytes: exact length of the metadata.
        payload_bytes: exact length of the payload, without the padding behind it.
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
        return HEADER.size + _align(self.meta_bytes)

    @property
    def frame_bytes(self) -> int:
        """Bytes from this frame's start to the next one's."""
        if self.flags & Flags.EXTERNAL:
            return self.payload_start + ALIGNMENT
        return self.payload_start + _align(self.payload_bytes)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What the metadata says of one array.

    Attributes:
        type_code: see `receiver.dtypes`.
        shape: in elements.
    """

    type_code: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks what numpy needs for an array of this kind to exist.

        Raises:
            ValueError: unknown type code, negative dimension, more than 64 dimensions, or 2**63 bytes or more.
            TypeError: a dimension is not an integer.
        """
        # int() also turns numpy integers and bools into what msgpack packs shortest.
        object.__setattr__(self, "type_code", int(self.type_code.__index__()))
        object.__setattr__(self, "shape", tuple(int(dim.__index__()) for dim in self.shape))
        if self.type_code not in BY_CODE:
            raise ValueError(f"type code {self.type_code}, expected one of {sorted(BY_CODE)}")
        if len(self.shape) > MAX_RANK:
            raise ValueError(f"{len(self.shape)} dimensions, expected at most {MAX_RANK}")
        if any(dim < 0 for dim in self.shape):
            raise ValueError(f"shape {self.shape}, expected no negative dimension")
        # numpy refuses such a shape even if another dimension is zero.
        nonzero = math.prod(dim for dim in self.shape if dim)
        if nonzero * BY_CODE[self.type_code].itemsize >= 1 << 63:
            raise ValueError(f"shape {self.shape}, expected less than 2**63 bytes")

    @classmethod
    def of(cls, dtype: Dtype, shape: Iterable[int]) -> ArraySpec:
        """The spec of arrays of this dtype, whatever its byte order.

        Raises:
            TypeError: the wire has no such dtype, or a dimension is not an integer.
            ValueError: the shape is not possible; see `__post_init__`.
        """
        return cls(wire_type_of(dtype).code, tuple(shape))

    @property
    def dtype(self) -> Dtype:
        """numpy's dtype.

        Raises:
            ImportError: it is from ml_dtypes, which is missing or too old.
        """
        return dtype_of(self.type_code)

    @property
    def bits(self) -> int:
        """Bits of one element on the wire."""
        return BY_CODE[self.type_code].bits

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return -(-math.prod(self.shape) * self.bits // 8)


def payload_layout(specs: Iterable[ArraySpec]) -> tuple[list[int], list[int], int]:
    """Where the arrays of a payload lie.

    Returns:
        Each array's offset from the payload's start, each one's length, and the payload's length.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    end = 0
    for spec in specs:
        nbytes = spec.nbytes
        # Small ones lie densely, so that a handful of scalars is one cache line.
        alignment = ALIGNMENT if nbytes >= ALIGNMENT else 8
        start = (end + alignment - 1) & -alignment
        offsets.append(start)
        sizes.append(nbytes)
        end = start + nbytes
    return offsets, sizes, end


def encode_metadata(specs: Iterable[ArraySpec]) -> bytes:
    """msgpack of `[[type_code, [dim, ...]], ...]` in its shortest form, without padding."""
    packed: bytes = msgpack.packb([(spec.type_code, spec.shape) for spec in specs])
    return packed


def decode_metadata(metadata: bytes) -> tuple[ArraySpec, ...]:
    """Reverses `encode_metadata`; no metadata at all means no arrays.

    Raises:
        CorruptFrameError: `metadata` is not what `encode_metadata` makes of any specs.
        UnsupportedDtypeError: a type code is unknown here.
    """
    if not metadata:
        return ()
    # Read entry by entry with small limits: a lying array length must not allocate what it claims.
    specs: list[ArraySpec] = []
    try:
        outer = _unpacker(metadata, max_array_len=len(metadata))
        count = outer.read_array_header()
        entries = _unpacker(metadata[outer.tell() :], max_array_len=MAX_RANK)
        for _ in range(count):
            type_code, shape = entries.unpack()
            if type(type_code) is int and type_code not in BY_CODE:
                raise UnsupportedDtypeError(
                    f"array {len(specs)} has type code {type_code}, this package knows {sorted(BY_CODE)}; "
                    "upgrade hostcallback here if the writer's is newer, otherwise the frame is corrupt"
                )
            specs.append(ArraySpec(type_code, tuple(shape)))
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise _bad_metadata(metadata, f"{type(error).__name__}: {error}") from error
    if encode_metadata(specs) != metadata:
        raise _bad_metadata(metadata, "not its shortest form, or more behind it")
    return tuple(specs)


def _unpacker(data: bytes, max_array_len: int) -> msgpack.Unpacker:
    # Of arrays and numbers; everything else that has a length is refused by it.
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(data),
        max_array_len=max_array_len,
        max_map_len=0,
        max_str_len=0,
        max_bin_len=0,
        max_ext_len=0,
    )
    unpacker.feed(data)
    return unpacker


def _bad_metadata(metadata: bytes, reason: str) -> CorruptFrameError:
    shown = metadata[:32].hex() + ("..." if len(metadata) > 32 else "")
    return CorruptFrameError(
        f"the metadata are {len(metadata)} bytes {shown} ({reason}), expected the msgpack of "
        "[[type_code, [dim, ...]], ...]; the frame was overwritten or its writer is broken: discard it"
    )


def encode_prefix(
    consumer_id: int, flags: Flags | int, specs: Iterable[ArraySpec], predicate: int = 0
) -> bytes:
    """What every frame of one tap begins with: header and padded metadata.

    The header has consumer id, flags and meta_bytes; an emission fills in the rest. See `frame_from_prefix`. Until then
    the device's place holds `predicate`: which of the arrays is that of a check.

    Raises:
        ValueError: a number is out of its range, or a flag is ring only.
    """
    metadata = encode_metadata(specs)
    header = Header(_public(flags), consumer_id, 0, 0, 0, predicate, len(metadata), 0, 0)
    return encode_header(header) + metadata.ljust(_align(len(metadata)), b"\0")


def frame_from_prefix(
    prefix: bytes,
    arrays: Sequence[Array],
    *,
    seq: int = 0,
    time_ns: int = 0,
    run_id: int = 0,
    device: int = 0,
    position: int = 0,
) -> bytes:
    """One frame, as the native encoder makes it from a prefix and arrays. Any thread; copies the arrays.

    Raises:
        ValueError: the arrays are not those that the prefix announces, or a number is out of its range.
        WireError: `prefix` is none of `encode_prefix`.
    """
    flags, consumer_id, meta_bytes, specs, offsets, payload_bytes = _parse_prefix(prefix)
    header = Header(flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, position)
    pieces: list[Any] = [encode_header(header), prefix[HEADER.size :]]
    if len(arrays) != len(specs):
        raise ValueError(f"{len(arrays)} arrays for a prefix that announces {len(specs)}")
    end = 0
    for array, spec, offset in zip(arrays, specs, offsets, strict=True):
        array = np.asarray(array)
        # Equal dtypes are the rule; the wire type is looked up only for those of the other byte order.
        if array.shape != spec.shape or (
            array.dtype != spec.dtype and wire_type_of(array.dtype).code != spec.type_code
        ):
            raise ValueError(
                f"array {array.dtype}{list(array.shape)} where the prefix announces "
                f"{spec.dtype}{list(spec.shape)}; pass the arrays that the prefix was made for"
            )
        raw = _wire_bytes(array, spec)
        pieces += (bytes(offset - end), raw)
        end = offset + raw.size
    pieces.append(bytes(_align(payload_bytes) - end))
    return b"".join(pieces)


def encode_frame(
    arrays: Iterable[Array],
    *,
    consumer_id: int,
    flags: Flags | int = 0,
    seq: int = 0,
    time_ns: int = 0,
    run_id: int = 0,
    device: int = 0,
    position: int = 0,
) -> bytes:
    """One frame. Arrays of any byte order and strides; they travel in C order, little-endian.

    Raises:
        TypeError: an array's dtype is none of the wire's.
        ValueError: a number is out of its range, or a flag is ring only.
    """
    arrays = [np.asarray(array) for array in arrays]
    prefix = encode_prefix(consumer_id, flags, [ArraySpec.of(a.dtype, a.shape) for a in arrays])
    return frame_from_prefix(
        prefix,
        arrays,
        seq=seq,
        time_ns=time_ns,
        run_id=run_id,
        device=device,
        position=position,
    )


def _wire_bytes(array: Array, spec: ArraySpec) -> Array:
    # uint8, shape [spec.nbytes]; a view where the memory is already what the wire wants.
    if spec.bits < 8:
        return pack_subbyte(array)
    return np.ascontiguousarray(array, spec.dtype).reshape(-1).view(np.uint8)


# One tap emits the same prefix again and again.
@functools.lru_cache(maxsize=256)
def _parse_prefix(
    prefix: bytes,
) -> tuple[Flags, int, int, tuple[ArraySpec, ...], list[int], int]:
    header = decode_header(prefix)
    if len(prefix) != header.payload_start:
        raise CorruptFrameError(
            f"the prefix has {len(prefix)} bytes, expected {header.payload_start} for the metadata length "
            "in its header; make it with encode_prefix"
        )
    specs = decode_metadata(_read_metadata(prefix, 0, header))
    offsets, _, payload_bytes = payload_layout(specs)
    return header.flags, header.consumer_id, header.meta_bytes, specs, offsets, payload_bytes


def _public(flags: Flags | int) -> Flags:
    if flags & ~_EVERYWHERE:
        raise ValueError(
            f"flags {int(flags):#x}, expected a combination of {_EVERYWHERE!r}; the others are set by a ring"
        )
    return Flags(flags)


def encode_header(header: Header) -> bytes:
    """The 64 bytes of a header, ring-only flags included.

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
    """The header at `offset`; only its 64 bytes need to be there. Ring-only flags are accepted.

    Raises:
        TruncatedFrameError: the buffer ends before the header does.
        CorruptFrameError: wrong magic, version 0, or a flag that does not exist.
        UnsupportedVersionError: the frame is of a newer format.
        ValueError: `offset` is negative.
    """
    if offset < 0:
        raise ValueError(f"offset {offset}, expected 0 or more")
    available = memoryview(buffer).nbytes - offset
    if available < HEADER.size:
        raise _truncated(offset, "its header", HEADER.size, available)
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


def decode_frame(
    buffer: Buffer, offset: int = 0, external_payload: Array | None = None
) -> tuple[Header, list[Array]]:
    """The header and the arrays of the frame at `offset`. Arrays as from `Decoder.decode`.

    Raises:
        WireError: as from `Decoder.decode`.
        ValueError: `offset` is negative.
    """
    header, metadata = _read_start(buffer, offset, external_payload)
    plan = _plan(metadata)
    _check_payload(buffer, offset, external_payload, header, plan)
    return header, _make_arrays(buffer, offset, external_payload, plan)


_ndarray: Any = np.ndarray  # untyped: mypy would want its buffer to be one


# How one array is made: shape, dtype, start within the payload, and the spec if it has to be unpacked from
# that many uint8. A plain tuple, which Python takes apart faster than a named one.
_Entry = tuple[tuple[int, ...], Dtype, int, ArraySpec | None]


class Plan(NamedTuple):
    """What follows from metadata alone.

    Attributes:
        meta_bytes: exact length of the metadata.
        payload_bytes: exact length of the payload.
        frame_bytes: of the frame, with the payload inline.
        payload_start: offset of the payload from the frame's first byte.
        entries: how each array is made.
        nbytes: of all arrays, once they are made.
        stackable: whether there are arrays, which can be viewed as they are in a payload.
    """

    meta_bytes: int
    payload_bytes: int
    frame_bytes: int
    payload_start: int
    entries: tuple[_Entry, ...]
    nbytes: int
    stackable: bool

    def views(self, payloads: Array, count: int, stride: int) -> list[Array]:
        """For each array a view of its values in `count` payloads, `stride` bytes apart: `[count, *shape]`."""
        return [
            _ndarray((count, *shape), dtype, payloads, start, (stride, *_c_strides(shape, dtype.itemsize)))
            for shape, dtype, start, _ in self.entries
        ]


def _c_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    strides = []
    for dim in reversed(shape):
        strides.append(itemsize)
        itemsize *= dim
    return strides[::-1]


def _plan(metadata: bytes) -> Plan:
    specs = decode_metadata(metadata)
    offsets, sizes, payload_bytes = payload_layout(specs)
    payload_start = HEADER.size + _align(len(metadata))
    entries: list[_Entry] = []
    for spec, offset, nbytes in zip(specs, offsets, sizes, strict=True):
        try:
            dtype = spec.dtype
        except ImportError as error:
            raise UnsupportedDtypeError(str(error)) from error
        if spec.bits < 8:
            entries.append(((nbytes,), np.dtype(np.uint8), offset, spec))
        else:
            entries.append((spec.shape, dtype, offset, None))
    return Plan(
        len(metadata),
        payload_bytes,
        payload_start + _align(payload_bytes),
        payload_start,
        tuple(entries),
        sum(math.prod(spec.shape) * BY_CODE[spec.type_code].itemsize for spec in specs),
        bool(specs) and all(spec.bits >= 8 for spec in specs),
    )


def _read_start(buffer: Buffer, offset: int, external_payload: Array | None) -> tuple[Header, bytes]:
    header = decode_header(buffer, offset)
    if header.flags & _NO_MESSAGE:
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r} and is no message; "
            "a ring's reader must not hand it on"
        )
    if bool(header.flags & Flags.EXTERNAL) != (external_payload is not None):
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r}, but "
            f"{'no' if external_payload is None else 'an'} external payload came with it; "
            "EXTERNAL and such a payload go together: discard it"
        )
    return header, _read_metadata(buffer, offset, header)


def _read_metadata(buffer: Buffer, offset: int, header: Header) -> bytes:
    view = memoryview(buffer)
    if view.nbytes - offset < header.payload_start:
        raise _truncated(offset, "its metadata", header.payload_start, view.nbytes - offset)
    start = offset + HEADER.size
    end = start + header.meta_bytes
    if any(view[end : offset + header.payload_start].tobytes()):
        raise CorruptFrameError(
            f"the metadata of the frame at offset {offset} end in nonzero padding, expected zeros behind "
            f"{header.meta_bytes} bytes; it was overwritten: discard it"
        )
    return view[start:end].tobytes()


def _check_payload(
    buffer: Buffer, offset: int, external_payload: Array | None, header: Header, plan: Plan
) -> None:
    if header.payload_bytes != plan.payload_bytes:
        raise CorruptFrameError(
            f"the frame at offset {offset} says {header.payload_bytes} payload bytes, expected "
            f"{plan.payload_bytes} for the arrays in its metadata; it was overwritten: discard it"
        )
    if external_payload is not None and external_payload.nbytes != plan.payload_bytes:
        raise CorruptFrameError(
            f"the external payload of the frame at offset {offset} has {external_payload.nbytes} bytes, "
            f"expected {plan.payload_bytes}; it belongs to another frame: discard both"
        )
    available = memoryview(buffer).nbytes - offset
    if available < header.frame_bytes:
        raise _truncated(offset, "it", header.frame_bytes, available)


def _truncated(offset: int, what: str, needed: int, available: int) -> TruncatedFrameError:
    return TruncatedFrameError(
        f"the buffer has {max(available, 0)} bytes from offset {offset} on, where {what} needs {needed}; "
        "read on before decoding, or, where the stream ends, drop this frame"
    )


def _make_arrays(buffer: Buffer, offset: int, external_payload: Array | None, plan: Plan) -> list[Array]:
    if external_payload is None:
        base, start = buffer, offset + plan.payload_start
    else:
        base, start = external_payload, 0
    arrays = []
    for shape, dtype, array_start, packed in plan.entries:
        view = _ndarray(shape, dtype, base, start + array_start)
        if packed is not None:
            arrays.append(unpack_subbyte(view, packed.dtype, packed.shape))
        elif external_payload is not None and view.flags.behaved:
            arrays.append(view)
        else:
            arrays.append(view.copy())
    return arrays


_START = struct.Struct("<IIQQqqiIQ8x64s")
"""The header with magic and version as one number and without position, and 64 bytes of metadata."""

_TAG = int.from_bytes(MAGIC + bytes([VERSION]), "little")
_NOT_INLINE = 0xFFFFFFFF & ~int(_EVERYWHERE)
_EXTERNAL = int(Flags.EXTERNAL)
_unpack_start = _START.unpack_from
_KNOWN_PLANS = 1024
_KNOWN_BYTES = 1 << 20

# meta_bytes, payload_bytes, frame_bytes of the plan; shape, dtype and offset from the header if there is just one
# array and it needs no unpacking; the plan. A plain tuple: see _Entry.
_Known = tuple[int, int, int, tuple[tuple[int, ...], Dtype, int] | None, Plan]


class Decoder:
    """Decodes frames as `decode_frame` does, faster for metadata it has seen. One thread at a time.

    It remembers what to do for up to 1024 different metadata, and 1 MiB of them; the oldest go first.
    """

    def __init__(self) -> None:
        """Starts with nothing remembered."""
        # By metadata padded to a multiple of 64. Padded, because then one unpacking of the header also gets the
        # key of all metadata up to 64 bytes, and a hit proves the padding to be zero. Since msgpack says itself
        # where it ends, no two metadata have one key.
        self._known: dict[bytes, _Known] = {}
        self._known_bytes = 0

    def decode(self, buffer: Buffer, offset: int = 0, external_payload: Array | None = None) -> Decoded:
        """Decodes the frame at `offset`.

        Args:
            buffer: bytes; may be reused as soon as this returns.
            offset: of the frame's header.
            external_payload: the payload of an EXTERNAL frame: uint8, contiguous. It becomes the arrays'.

        Returns:
            consumer_id, flags, seq, time_ns, run_id, device, arrays. The arrays are writable and aligned. They
            own their memory, but for those of an external payload, which are views of it (copies only if it
            is read-only or misaligned, or a dtype of less than a byte has to be unpacked).

        Raises:
            TruncatedFrameError: the buffer ends before the frame does.
            CorruptFrameError: the bytes contradict the format or each other, are no message, or do not go with
                `external_payload`.
            UnsupportedVersionError: the frame is of a newer format.
            UnsupportedDtypeError: it holds a dtype of which this package, or the installed ml_dtypes, knows
                nothing.
            ValueError: `offset` is negative.
        """
        # Whatever is not quite as usual goes the careful way, which tells what is wrong, if anything is.
        try:
            tag, flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, key = (
                _unpack_start(buffer, offset)
            )
        except struct.error:
            return self._decode_carefully(buffer, offset, external_payload)
        if 64 < meta_bytes <= _KNOWN_BYTES:
            start = offset + 64
            key = memoryview(buffer)[start : start + _align(meta_bytes)].tobytes()
        known = self._known.get(key)
        if known is None:
            return self._decode_carefully(buffer, offset, external_payload)
        known_meta_bytes, known_payload_bytes, frame_bytes, lone, plan = known
        if external_payload is None:
            unusual = flags & _NOT_INLINE
        else:
            unusual = flags & _NOT_INLINE != _EXTERNAL or external_payload.nbytes != payload_bytes
            frame_bytes = plan.payload_start + ALIGNMENT
            lone = None
        if (
            unusual
            or tag != _TAG
            or meta_bytes != known_meta_bytes
            or payload_bytes != known_payload_bytes
            or len(buffer) - offset < frame_bytes
            or offset < 0
        ):
            return self._decode_carefully(buffer, offset, external_payload)
        if lone is not None:
            shape, dtype, start = lone
            arrays = [_ndarray(shape, dtype, buffer, offset + start).copy()]
        else:
            arrays = _make_arrays(buffer, offset, external_payload, plan)
        return consumer_id, flags, seq, time_ns, run_id, device, arrays

    def plan(self, buffer: Buffer, offset: int) -> Plan:
        """What to make of the frame at `offset`, whose payload is inline, as its metadata say.

        Raises:
            WireError: as from `decode`, where the metadata are concerned.
        """
        *_, meta_bytes, _, key = _unpack_start(buffer, offset)
        if meta_bytes > 64:
            key = memoryview(buffer)[offset + 64 : offset + 64 + _align(meta_bytes)].tobytes()
        known = self._known.get(key)
        if known is not None and known[0] == meta_bytes:
            return known[-1]
        _, metadata = _read_start(buffer, offset, None)
        return self._plan_of(metadata)

    def _plan_of(self, metadata: bytes) -> Plan:
        key = metadata.ljust(_align(len(metadata)), b"\0")
        known = self._known.get(key)
        if known is not None and known[0] == len(metadata):
            return known[-1]
        plan = _plan(metadata)
        self._remember(key, plan)
        return plan

    def _decode_carefully(self, buffer: Buffer, offset: int, external_payload: Array | None) -> Decoded:
        header, metadata = _read_start(buffer, offset, external_payload)
        plan = self._plan_of(metadata)
        _check_payload(buffer, offset, external_payload, header, plan)
        arrays = _make_arrays(buffer, offset, external_payload, plan)
        return (
            header.consumer_id,
            int(header.flags),
            header.seq,
            header.time_ns,
            header.run_id,
            header.device,
            arrays,
        )

    def _remember(self, key: bytes, plan: Plan) -> None:
        if not 0 < len(key) <= _KNOWN_BYTES:
            return
        lone = None
        if len(plan.entries) == 1:
            shape, dtype, start, packed = plan.entries[0]
            if packed is None:
                lone = shape, dtype, plan.payload_start + start
        self._known[key] = plan.meta_bytes, plan.payload_bytes, plan.frame_bytes, lone, plan
        self._known_bytes += len(key)
        while len(self._known) > _KNOWN_PLANS or self._known_bytes > _KNOWN_BYTES:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._known_bytes -= len(oldest)
