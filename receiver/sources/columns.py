"""One read of a native ring as columns: the headers by field, and which messages are alike."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from receiver.native import bindings as native
from receiver.wire.dtypes import Array

_FIELDS: Sequence[tuple[str, Any]] = (
    ("consumer_ids", np.uint64),
    ("flags", np.uint64),
    ("seqs", np.uint64),
    ("times_ns", np.int64),
    ("run_ids", np.int64),
    ("order", np.uint64),
)


class Group(NamedTuple):
    """Messages of one read with equal metadata, and, if their consumer takes stacks, for one consumer.

    Attributes:
        frame: index of the first of them.
        first: where they begin in the columns' order.
        size: how many they are.
        payload_bytes: of each.
    """

    frame: int
    first: int
    size: int
    payload_bytes: int


class BatchColumns:
    """The columns of the batch that was read last. Reader thread only; good until the batch is released.

    Attributes:
        memory: the ring's.
        bytes: the same, as an array.
        words: the same, as an array of uint64.
    """

    def __init__(self, library: ctypes.PyDLL, ring: int, memory: memoryview, batch: native.Batch) -> None:
        """For all batches of a ring, whose memory is `memory`; `batch` is where each is listed."""
        self.memory = memory
        self.bytes = np.frombuffer(memory, np.uint8)
        self.words = np.frombuffer(memory, "<u8")
        self._library = library
        self._ring = ring
        self._batch = batch
        self._batch_pointer = ctypes.byref(batch)
        self._native = native.Columns()
        self._pointer = ctypes.byref(self._native)
        self._count = 0
        self._offsets = np.frombuffer(
            memoryview(batch), np.int64, native.BATCH_FRAMES, native.Batch.offsets.offset
        )
        self._views = [
            np.frombuffer(
                memoryview(self._native), dtype, native.BATCH_FRAMES, getattr(native.Columns, name).offset
            )
            for name, dtype in _FIELDS
        ]

    def read(self, count: int) -> None:
        """Reads the batch's `count` messages."""
        self._library.hcb_batch_columns(self._ring, self._batch_pointer, self._pointer)
        self._count = count

    def lists(self) -> Sequence[list[int]]:
        """Lists of consumer_id, flags, seq, time_ns and run_id, in order of emission.

        Last the order of `groups`: group by group, then the messages of none.
        """
        return [view[: self._count].tolist() for view in self._views]

    def numbers(self, place: int) -> Sequence[int]:
        """consumer_id, flags, seq, time_ns and run_id of one message."""
        return [view.item(place) for view in self._views[:-1]]

    def offset(self, frame: int) -> int:
        """Where in `memory` the header of a frame is."""
        offset: int = self._batch.offsets[frame]
        return offset

    def offsets(self, count: int) -> Array:
        """Where in `memory` the headers of the first `count` frames are, int64. A view; `read` is not needed for it."""
        return self._offsets[:count]

    def groups(self) -> list[Group]:
        """The groups of the messages that `read` found."""
        found = self._native.group[: self._native.groups]
        return [Group(group.frame, group.first, group.count, group.payload_bytes) for group in found]

    def stack(self, start: int, count: int, stride: int) -> Array:
        """The payloads of `count` messages of one group, from the place `start` of the order on.

        Returns:
            Fresh bytes in which they lie `stride` bytes apart; what lies between is arbitrary.
        """
        out = np.empty(count * stride, np.uint8)
        self._library.hcb_batch_stack(
            self._ring, self._batch_pointer, self._pointer, start, count, stride, out.ctypes.data
        )
        return out
