"""Plans: everything about decoding a frame that follows from its metadata alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.wire.dtypes import BY_CODE, Array, Dtype
from hostcallback.receiver.wire.errors import UnsupportedDtypeError
from hostcallback.receiver.wire.header import HEADER, align
from hostcallback.receiver.wire.metadata import ArraySpec, decode_metadata, payload_layout

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
