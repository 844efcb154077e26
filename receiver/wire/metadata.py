"""What a frame says of its arrays: types and shapes, and where they lie in its payload."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from receiver.wire.dtypes import BY_CODE, Dtype, dtype_of, wire_type_of
from receiver.wire.errors import CorruptFrameError, UnsupportedDtypeError
from receiver.wire.header import ALIGNMENT

MAX_RANK = 64  # numpy's limit


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What the metadata says of one array.

    Attributes:
        type_code: see `receiver.wire.dtypes`.
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
