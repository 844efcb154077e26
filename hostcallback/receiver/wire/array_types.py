"""The types of a frame's arrays: dtypes and shapes, the metadata that encode them, and the layout of the payload."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.errors import CorruptFrameError, UnsupportedDtypeError

ALIGNMENT = 64
"""Of frames, payloads and large arrays in them, in bytes."""

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


MAX_RANK = 64  # numpy's limit


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Type and shape of one array in metadata.

    Attributes:
        type_code: see `hostcallback.receiver.wire.frame`.
        shape: in elements.
    """

    type_code: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that numpy can create an array of this type and shape.

        Raises:
            ValueError: unknown type code, negative dimension, more than 64 dimensions, or 2**63 bytes or more.
            TypeError: a dimension is not an integer.
        """
        # int() also converts numpy integers and bools, which msgpack would encode longer or not at all.
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
        """The spec of arrays of a dtype of any byte order.

        Raises:
            TypeError: the wire format has no such dtype, or a dimension is not an integer.
            ValueError: the shape is not possible; see `__post_init__`.
        """
        return cls(wire_type_of(dtype).code, tuple(shape))

    @property
    def dtype(self) -> Dtype:
        """The numpy dtype.

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
    """Places the arrays of a payload.

    Returns:
        Each array's offset from the payload's start and its length, and the payload's length, all in bytes.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    end = 0
    for spec in specs:
        nbytes = spec.nbytes
        # Small arrays are packed tightly, so that a few scalars fit into one cache line.
        alignment = ALIGNMENT if nbytes >= ALIGNMENT else 8
        start = (end + alignment - 1) & -alignment
        offsets.append(start)
        sizes.append(nbytes)
        end = start + nbytes
    return offsets, sizes, end


def encode_metadata(specs: Iterable[ArraySpec]) -> bytes:
    """Encodes specs as the msgpack of `[[type_code, [dim, ...]], ...]` in its shortest form, without padding."""
    packed: bytes = msgpack.packb([(spec.type_code, spec.shape) for spec in specs])
    return packed


def decode_metadata(metadata: bytes) -> tuple[ArraySpec, ...]:
    """Reverses `encode_metadata`; empty metadata mean no arrays.

    Raises:
        CorruptFrameError: `metadata` is not a result of `encode_metadata`.
        UnsupportedDtypeError: a type code is unknown.
    """
    if not metadata:
        return ()
    # Entry by entry with small limits: a wrong array length must not allocate that much memory.
    specs: list[ArraySpec] = []
    try:
        outer = _unpacker(metadata, max_array_len=len(metadata))
        count = outer.read_array_header()
        if count > limits.ARRAYS:
            raise ValueError(f"{count} arrays, at most {limits.ARRAYS} are allowed")
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
        raise _bad_metadata(metadata, "not its shortest form, or followed by other bytes")
    return tuple(specs)


def _unpacker(data: bytes, max_array_len: int) -> msgpack.Unpacker:
    # Accepts arrays and numbers; refuses every other type that has a length.
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
