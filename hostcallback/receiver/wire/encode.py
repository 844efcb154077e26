"""Encodes arrays as frames, and reads one frame back; plans hold what follows from a frame's metadata alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.wire.dtypes import (
    BY_CODE,
    Array,
    Dtype,
    pack_subbyte,
    unpack_subbyte,
    wire_type_of,
)
from hostcallback.receiver.wire.header import (
    EVERYWHERE,
    HEADER,
    NO_MESSAGE,
    PREFIX_ONLY,
    Buffer,
    CorruptFrameError,
    Flags,
    Header,
    UnsupportedDtypeError,
    align,
    decode_header,
    encode_header,
    truncated,
)
from hostcallback.receiver.wire.tap_descriptor import (
    ArraySpec,
    decode_metadata,
    encode_metadata,
    payload_layout,
)

ndarray: Any = np.ndarray  # untyped: mypy would require its buffer to be an array

# How to create one array: shape, dtype, offset in the payload, and the spec if the array has to be unpacked from
# that many uint8. A plain tuple, which Python unpacks faster than a named one.
_Entry = tuple[tuple[int, ...], Dtype, int, ArraySpec | None]


class Plan(NamedTuple):
    """Everything about decoding a frame that follows from its metadata.

    Attributes:
        meta_bytes: exact length of the metadata.
        payload_bytes: exact length of the payload.
        frame_bytes: length of the frame with the payload inline.
        payload_start: offset of the payload from the frame's first byte.
        entries: how to create each array.
        nbytes: of all arrays in memory.
        stackable: whether there are arrays, and all can be viewed in a payload without unpacking.
    """

    meta_bytes: int
    payload_bytes: int
    frame_bytes: int
    payload_start: int
    entries: tuple[_Entry, ...]
    nbytes: int
    stackable: bool

    def views(self, payloads: Array, count: int, stride: int) -> list[Array]:
        """For each array, a view of its values in `count` payloads, `stride` bytes apart: shape `[count, *shape]`."""
        return [
            ndarray((count, *shape), dtype, payloads, start, (stride, *_c_strides(shape, dtype.itemsize)))
            for shape, dtype, start, _ in self.entries
        ]


def _c_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    strides = []
    for dim in reversed(shape):
        strides.append(itemsize)
        itemsize *= dim
    return strides[::-1]


def make_plan(metadata: bytes) -> Plan:
    """Creates the plan for metadata.

    Raises:
        CorruptFrameError: the metadata are invalid.
        UnsupportedDtypeError: they name a dtype that this installation does not have.
    """
    specs = decode_metadata(metadata)
    offsets, sizes, payload_bytes = payload_layout(specs)
    payload_start = HEADER.size + align(len(metadata))
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
        payload_start + align(payload_bytes),
        payload_start,
        tuple(entries),
        sum(math.prod(spec.shape) * BY_CODE[spec.type_code].itemsize for spec in specs),
        bool(specs) and all(spec.bits >= 8 for spec in specs),
    )


def read_start(buffer: Buffer, offset: int, external_payload: Array | None) -> tuple[Header, bytes]:
    """Reads the header and the metadata of the frame at `offset`.

    Raises:
        WireError: it is not a message, or continues beyond the buffer.
    """
    header = decode_header(buffer, offset)
    if header.flags & NO_MESSAGE:
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r} and is not a message; "
            "a ring's reader must not pass it on"
        )
    if bool(header.flags & Flags.EXTERNAL) != (external_payload is not None):
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r}, but "
            f"{'no' if external_payload is None else 'an'} external payload came with it; "
            "EXTERNAL and such a payload go together: discard it"
        )
    return header, read_metadata(buffer, offset, header)


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


def check_payload(
    buffer: Buffer, offset: int, external_payload: Array | None, header: Header, plan: Plan
) -> None:
    """Raises WireError if the payload's length differs from the metadata's, or the buffer ends before it."""
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
        raise truncated(offset, "it", header.frame_bytes, available)


def make_arrays(buffer: Buffer, offset: int, external_payload: Array | None, plan: Plan) -> list[Array]:
    """Returns the arrays of a frame, as `Decoder.decode` describes them."""
    if external_payload is None:
        base, start = buffer, offset + plan.payload_start
    else:
        base, start = external_payload, 0
    arrays = []
    for shape, dtype, array_start, packed in plan.entries:
        view = ndarray(shape, dtype, base, start + array_start)
        if packed is not None:
            arrays.append(unpack_subbyte(view, packed.dtype, packed.shape))
        elif external_payload is not None and view.flags.behaved:
            arrays.append(view)
        else:
            arrays.append(view.copy())
    return arrays


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
