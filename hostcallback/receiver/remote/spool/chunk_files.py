"""Reads slices of the segments in a stream's folder, and keeps the last segment open."""

from __future__ import annotations

import os

from hostcallback.receiver.remote.spool.directory import StreamFolder
from hostcallback.receiver.remote.streams import PIECE_BYTES, SegmentSlice, StreamOffset


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
