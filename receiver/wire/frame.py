"""Reads one frame, and reports its errors."""

from __future__ import annotations

from hostcallback.receiver.wire.dtypes import Array, unpack_subbyte
from hostcallback.receiver.wire.errors import CorruptFrameError
from hostcallback.receiver.wire.header import (
    HEADER,
    NO_MESSAGE,
    Buffer,
    Flags,
    Header,
    decode_header,
    truncated,
)
from hostcallback.receiver.wire.plan import Plan, ndarray


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
