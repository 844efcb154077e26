"""One read of a native ring as columns: the header fields, and the groups of alike messages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.array_types import Array

_FIELDS: Sequence[tuple[str, Any]] = (
    ("consumer_ids", np.uint64),
    ("flags", np.uint64),
    ("seqs", np.uint64),
    ("times_ns", np.int64),
    ("run_ids", np.int64),
    ("order", np.uint64),
)


QUICK_BYTES = 64 << 10
"""Frames, and results of calls, that are copied without giving up the interpreter lock, in bytes."""


class BatchColumns:
    """The columns of the last batch of a ring. Reader thread only; valid until the batch is released.

    Attributes:
        memory: the ring's memory.
    """

    def __init__(self, library: ctypes.PyDLL, ring: int, memory: memoryview, batch: native.Batch) -> None:
        """Serves all batches of a ring: `memory` is the ring's, `batch` the structure into which it is read."""
        self.memory = memory
        self._library = library
        self._ring = ring
        self._batch = batch
        self._batch_pointer = ctypes.byref(batch)
        self._native = native.Columns()
        self._pointer = ctypes.byref(self._native)
        self._count = 0
        self._views = [
            np.frombuffer(
                memoryview(self._native), dtype, native.BATCH_FRAMES, getattr(native.Columns, name).offset
            )
            for name, dtype in _FIELDS
        ]

    def read(self, count: int) -> None:
        """Reads the headers of the batch's `count` messages."""
        # The library keeps the interpreter lock: releasing it would take longer than the call, and let other
        # threads in.
        self._library.hcb_batch_columns(self._ring, self._batch_pointer, self._pointer)
        self._count = count

    def lists(self) -> Sequence[list[int]]:
        """Lists of consumer_id, flags, seq, time_ns and run_id, in order of emission, and the order of the groups.

        The order lists message indices, group by group, then those of messages in no group.
        """
        return [view[: self._count].tolist() for view in self._views]

    def numbers(self, place: int) -> Sequence[int]:
        """Returns consumer_id, flags, seq, time_ns and run_id of one message."""
        return [view.item(place) for view in self._views[:-1]]

    def offset(self, frame: int) -> int:
        """Offset of a frame's header in `memory`, in bytes."""
        offset: int = self._batch.offsets[frame]
        return offset

    def groups(self) -> list[native.Group]:
        """Groups of the messages that `read` found: of equal metadata and, if it takes stacks, of one consumer."""
        found: list[native.Group] = self._native.group[: self._native.groups]
        return found

    def stack(self, start: int, count: int, stride: int) -> Array:
        """Copies the payloads of `count` messages of one group, from index `start` of the order on.

        Returns:
            uint8, shape (count * stride,), fresh memory: a payload every `stride` bytes. The gaps are uninitialized.
        """
        out = np.empty(count * stride, np.uint8)
        self._library.hcb_batch_stack(
            self._ring, self._batch_pointer, self._pointer, start, count, stride, out.ctypes.data
        )
        return out

    def copied(self, count: int, room: Callable[[int], Array]) -> tuple[Array, Array]:
        """Copies the batch's `count` frames, one after another, EXTERNAL ones as inline ones. Needs no `read`.

        Args:
            count: of the frames.
            room: makes the memory of the copies: uint8, shape (bytes,).

        Returns:
            The copies, and the offset of each in bytes: int64, shape (count,).
        """
        offsets = np.empty(count, np.int64)
        nbytes = self._library.hcb_batch_layout(self._ring, self._batch_pointer, offsets.ctypes.data)
        data = room(nbytes)
        library = self._library if nbytes <= QUICK_BYTES else native.load()
        library.hcb_batch_copy(self._ring, self._batch_pointer, data.ctypes.data)
        return data, offsets
