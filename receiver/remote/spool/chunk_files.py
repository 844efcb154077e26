"""Reads pieces of the segments in a stream's folder; the last one stays open."""

from __future__ import annotations

import os

from receiver.remote.spool.directory import StreamFolder
from receiver.remote.streams import PIECE_BYTES, SegmentSlice, StreamOffset


class PieceFiles:
    """One thread."""

    def __init__(self, folder: StreamFolder) -> None:
        """Opens nothing."""
        self._folder = folder
        self._number = 0
        self._descriptor = -1

    def read(self, position: StreamOffset, nbytes: int = PIECE_BYTES) -> SegmentSlice:
        """The piece at `position`, of as many bytes if there are so many and they are not too many.

        Raises:
            OSError: it cannot be read.
        """
        if self._number != position.segment:
            self.close()
            path = self._folder.segment(position.segment)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._number = position.segment
        return SegmentSlice(position, os.pread(self._descriptor, min(nbytes, PIECE_BYTES), position.offset))

    def close(self) -> None:
        """Closes what is open."""
        descriptor, self._descriptor, self._number = self._descriptor, -1, 0
        if descriptor >= 0:
            os.close(descriptor)
