"""Encodes arrays as frames."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.wire.dtypes import Array, pack_subbyte, wire_type_of
from hostcallback.receiver.wire.errors import CorruptFrameError
from hostcallback.receiver.wire.frame import read_metadata
from hostcallback.receiver.wire.header import (
    EVERYWHERE,
    HEADER,
    PREFIX_ONLY,
    Flags,
    Header,
    align,
    decode_header,
    encode_header,
)
from hostcallback.receiver.wire.metadata import ArraySpec, decode_metadata, encode_metadata, payload_layout


def encode_prefix(
    consumer_id: int, flags: Flags | int, specs: Iterable[ArraySpec], predicate: int = 0
) -> bytes:
    """Encodes the common beginning of all frames of one tap: header and padded metadata.

    The header has consumer id, flags and meta_bytes; an emission fills in the rest, see `frame_from_prefix`. Until then
    the device field holds `predicate`: the index of a check's predicate among the arrays.

    Raises:
        ValueError: a number is out of its range, or a flag is ring only.
    """
    metadata = encode_metadata(specs)
    header = Header(_public(flags, PREFIX_ONLY), consumer_id, 0, 0, 0, predicate, len(metadata), 0, 0)
    return encode_header(header) + metadata.ljust(align(len(metadata)), b"\0")


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
            array.dtype != spec.dtype and wire_type_of(array.dtype).code != spec.type_code
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
    """Encodes one frame. Arrays may have any byte order and strides; the frame has them in C order, little-endian.

    Raises:
        TypeError: the wire format has no such dtype.
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
    # uint8, shape [spec.nbytes]; a view if the memory already has the wire's form.
    if spec.bits < 8:
        return pack_subbyte(array)
    return np.ascontiguousarray(array, spec.dtype).reshape(-1).view(np.uint8)


# Cached, because a tap emits the same prefix repeatedly.
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
    specs = decode_metadata(read_metadata(prefix, 0, header))
    offsets, _, payload_bytes = payload_layout(specs)
    return header.flags, header.consumer_id, header.meta_bytes, specs, offsets, payload_bytes


def _public(flags: Flags | int, more: int = 0) -> Flags:
    if flags & ~(EVERYWHERE | more):
        raise ValueError(
            f"flags {int(flags):#x}, expected a combination of {EVERYWHERE!r}; only a ring sets the others"
        )
    return Flags(flags)
