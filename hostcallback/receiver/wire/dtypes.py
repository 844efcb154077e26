"""The dtypes of the wire format: type codes, names, numpy dtypes, and the packing of sub-byte dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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
