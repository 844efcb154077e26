"""The metadata of a frame: types and shapes of its arrays, and their places in its payload."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from hostcallback.receiver import limits
from hostcallback.receiver.wire.dtypes import BY_CODE, Dtype, dtype_of, wire_type_of
from hostcallback.receiver.wire.errors import CorruptFrameError, UnsupportedDtypeError
from hostcallback.receiver.wire.header import ALIGNMENT

MAX_RANK = 64  # numpy's limit


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Type and shape of one array in metadata.

    Attributes:
        type_code: see `hostcallback.receiver.wire.dtypes`.
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
