"""Decodes frames into arrays; plans hold what follows from a frame's metadata alone."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import CorruptFrameError, UnsupportedDtypeError
from hostcallback.receiver.wire import frame
from hostcallback.receiver.wire.array_types import (
    ALIGNMENT,
    BY_CODE,
    Array,
    ArraySpec,
    Dtype,
    decode_metadata,
    payload_layout,
    unpack_subbyte,
)

ndarray: Any = np.ndarray  # untyped: mypy would require its buffer to be an array

# How to create one array: shape, dtype, offset in the payload, and the spec if the array has to be unpacked from
# that many uint8. A plain tuple, which Python unpacks faster than a named one.
_Entry = tuple[tuple[int, ...], Dtype, int, ArraySpec | None]


class Plan(NamedTuple):
    """All that decoding a frame needs to know from its metadata.

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
    payload_start = frame.HEADER.size + frame.align(len(metadata))
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
        payload_start + frame.align(payload_bytes),
        payload_start,
        tuple(entries),
        sum(math.prod(spec.shape) * BY_CODE[spec.type_code].itemsize for spec in specs),
        bool(specs) and all(spec.bits >= 8 for spec in specs),
    )


def read_start(
    buffer: frame.Buffer, offset: int, external_payload: Array | None
) -> tuple[frame.Header, bytes]:
    """Reads the header and the metadata of the frame at `offset`.

    Raises:
        WireError: it is not a message, or continues beyond the buffer.
    """
    header = frame.decode_header(buffer, offset)
    if header.flags & frame.NO_MESSAGE:
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r} and is not a message; "
            "a ring's reader must not pass it on"
        )
    if bool(header.flags & frame.Flags.EXTERNAL) != (external_payload is not None):
        raise CorruptFrameError(
            f"the frame at offset {offset} has flags {header.flags!r}, but "
            f"{'no' if external_payload is None else 'an'} external payload came with it; "
            "EXTERNAL and such a payload go together: discard it"
        )
    return header, frame.read_metadata(buffer, offset, header)


def check_payload(
    buffer: frame.Buffer, offset: int, external_payload: Array | None, header: frame.Header, plan: Plan
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
        raise frame.truncated(offset, "it", header.frame_bytes, available)


def make_arrays(buffer: frame.Buffer, offset: int, external_payload: Array | None, plan: Plan) -> list[Array]:
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


Decoded = tuple[int, int, int, int, int, int, list[Array]]
"""consumer_id, flags, seq, time_ns, run_id, device, arrays."""


def decode_frame(
    buffer: frame.Buffer, offset: int = 0, external_payload: Array | None = None
) -> tuple[frame.Header, list[Array]]:
    """Decodes the frame at `offset` into its header and arrays, which are as from `Decoder.decode`.

    Raises:
        WireError: as from `Decoder.decode`.
        ValueError: `offset` is negative.
    """
    header, metadata = read_start(buffer, offset, external_payload)
    plan = make_plan(metadata)
    check_payload(buffer, offset, external_payload, header, plan)
    return header, make_arrays(buffer, offset, external_payload, plan)


_START = struct.Struct("<IIQQqqiIQ8x64s")
"""The header with magic and version as one number and without position, and 64 bytes of metadata."""

_TAG = int.from_bytes(frame.MAGIC + bytes([frame.VERSION]), "little")
_NOT_INLINE = 0xFFFFFFFF & ~int(frame.EVERYWHERE)
_EXTERNAL = int(frame.Flags.EXTERNAL)
_unpack_start = _START.unpack_from
_KNOWN_PLANS = 1024
_KNOWN_BYTES = 1 << 20


# meta_bytes, payload_bytes, frame_bytes of the plan; shape, dtype and offset from the header if there is just one
# array and it needs no unpacking; the plan. A plain tuple: see _Entry.
_Known = tuple[int, int, int, tuple[tuple[int, ...], Dtype, int] | None, Plan]


class Decoder:
    """Decodes frames as `decode_frame` does, faster for known metadata. One thread at a time.

    It remembers up to 1024 plans, and 1 MiB of metadata; the oldest are dropped first.
    """

    def __init__(self) -> None:
        """No metadata is known yet."""
        # By metadata padded to a multiple of 64. Padded, because then one unpacking of the header also yields the
        # key of all metadata up to 64 bytes, and a hit proves the padding to be zero. Since msgpack encodes its own
        # length, no two metadata have the same key.
        self._known: dict[bytes, _Known] = {}
        self._known_bytes = 0

    def decode(self, buffer: frame.Buffer, offset: int = 0, external_payload: Array | None = None) -> Decoded:
        """Decodes the frame at `offset`.

        Args:
            buffer: bytes; may be reused as soon as this returns.
            offset: of the frame's header.
            external_payload: payload of an EXTERNAL frame: uint8, contiguous. The arrays take ownership of it.

        Returns:
            consumer_id, flags, seq, time_ns, run_id, device, arrays. The arrays have the metadata's shapes and
            dtypes, and are writable and aligned. They own their memory, except that those of an external payload are
            views of it (copies only if it is read-only or misaligned, or a dtype of less than a byte has to be
            unpacked).

        Raises:
            TruncatedFrameError: the buffer ends before the frame does.
            CorruptFrameError: the bytes contradict the format or each other, are not a message, or do not fit
                `external_payload`.
            UnsupportedVersionError: the frame is of a newer format.
            UnsupportedDtypeError: it contains a dtype that this package, or the installed ml_dtypes, does not know.
            ValueError: `offset` is negative.
        """
        # Any frame that is not entirely usual takes the slow path, which reports errors.
        try:
            tag, flags, consumer_id, seq, time_ns, run_id, device, meta_bytes, payload_bytes, key = (
                _unpack_start(buffer, offset)
            )
        except struct.error:
            return self._decode_carefully(buffer, offset, external_payload)
        if 64 < meta_bytes <= _KNOWN_BYTES:
            start = offset + 64
            key = memoryview(buffer)[start : start + frame.align(meta_bytes)].tobytes()
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
            arrays = [ndarray(shape, dtype, buffer, offset + start).copy()]
        else:
            arrays = make_arrays(buffer, offset, external_payload, plan)
        return consumer_id, flags, seq, time_ns, run_id, device, arrays

    def plan(self, buffer: frame.Buffer, offset: int) -> Plan:
        """Returns the plan for the frame at `offset`, whose payload is inline.

        Raises:
            WireError: as from `decode`, for errors in the metadata.
        """
        *_, meta_bytes, _, key = _unpack_start(buffer, offset)
        if meta_bytes > 64:
            key = memoryview(buffer)[offset + 64 : offset + 64 + frame.align(meta_bytes)].tobytes()
        known = self._known.get(key)
        if known is not None and known[0] == meta_bytes:
            return known[-1]
        _, metadata = read_start(buffer, offset, None)
        return self._plan_of(metadata)

    def _plan_of(self, metadata: bytes) -> Plan:
        key = metadata.ljust(frame.align(len(metadata)), b"\0")
        known = self._known.get(key)
        if known is not None and known[0] == len(metadata):
            return known[-1]
        plan = make_plan(metadata)
        self._remember(key, plan)
        return plan

    def _decode_carefully(self, buffer: frame.Buffer, offset: int, external_payload: Array | None) -> Decoded:
        header, metadata = read_start(buffer, offset, external_payload)
        plan = self._plan_of(metadata)
        check_payload(buffer, offset, external_payload, header, plan)
        arrays = make_arrays(buffer, offset, external_payload, plan)
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
