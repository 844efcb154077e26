"""Slices of a spool: their sources, reading them from files, and when they are sent."""

from __future__ import annotations

import os
import time
from typing import Protocol

from hostcallback.receiver.remote.spool.directory import StreamFolder
from hostcallback.receiver.remote.streams import PIECE_BYTES, SegmentSlice, StreamKey, StreamOffset


class SliceFiles:
    """Reads the segments of one stream. One thread."""

    def __init__(self, folder: StreamFolder) -> None:
        """No file is open yet."""
        self._folder = folder
        self._number = 0
        self._descriptor = -1

    def read(self, position: StreamOffset, nbytes: int = PIECE_BYTES) -> SegmentSlice:
        """Reads up to `nbytes` at `position`, at most `PIECE_BYTES` and at most to the segment's end.

        Raises:
            OSError: the segment cannot be read.
        """
        if self._number != position.segment:
            self.close()
            path = self._folder.segment(position.segment)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._number = position.segment
        return SegmentSlice(position, os.pread(self._descriptor, min(nbytes, PIECE_BYTES), position.offset))

    def close(self) -> None:
        """Closes the open segment."""
        descriptor, self._descriptor, self._number = self._descriptor, -1, 0
        if descriptor >= 0:
            os.close(descriptor)


class SliceSource(Protocol):
    """A stream that a sender sends.

    Attributes:
        key: identifies the stream.
        sent_before: end of what another sender may have sent of it.
    """

    key: StreamKey
    sent_before: StreamOffset

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """Returns the next slice from `position` on; None if none came in `timeout_sec`.

        The slice starts elsewhere if a new segment starts, or if the data at `position` was dropped.
        """

    def acked(self, position: StreamOffset) -> None:
        """Notes that everything before `position` is safely stored by the collector."""

    def is_sent(self) -> bool:
        """Whether the collector has stored all data so far."""


SEND_BYTES = 256 << 10
SEND_SEC = 0.1
"""Seconds between slices of less than `SEND_BYTES`: each slice wakes several threads on both sides."""

BUSY_SEC = 1.0
"""The same while the last slice is not acknowledged: a busy collector gets fewer and larger slices."""


class SendPolicy:
    """Decides when the data of one stream is sent. Its owner's lock protects it."""

    def __init__(self, send_bytes: int = SEND_BYTES) -> None:
        """No data was sent yet. `send_bytes` is the amount that is sent at once; at most `SEND_BYTES`."""
        self._send_bytes = min(send_bytes, SEND_BYTES)
        self._sent_at = -BUSY_SEC
        self._hurries = False
        self._written = 0
        self._is_idle = True

    def hurry(self) -> None:
        """Sends all data written so far without waiting for more."""
        self._hurries = True

    def wrote(self, nbytes: int) -> bool:
        """Notes that bytes were written; returns whether the sender should look at them now."""
        self._written += nbytes
        return self._is_idle or self._hurries or self._written >= self._send_bytes

    def wait_sec(self, nbytes: int, *, acked: bool) -> float:
        """Returns the seconds for which `nbytes` wait before they are sent, unless more are written.

        Args:
            nbytes: unsent bytes.
            acked: whether all sent data is acknowledged.
        """
        self._is_idle = False
        if self._hurries or nbytes >= self._send_bytes:
            return 0.0
        return max(0.0, self._sent_at + (SEND_SEC if acked else BUSY_SEC) - time.monotonic())

    def sends(self, *, everything: bool) -> None:
        """Notes that a slice is sent now. `everything`: it contains all unsent data."""
        self._sent_at = time.monotonic()
        self._written = 0
        self._hurries = self._hurries and not everything

    def has_nothing(self) -> None:
        """Notes that all written data is sent, so that the sender looks at the next write."""
        self._is_idle = True
