"""The spool of a process that is dead, to be sent by another one."""

from __future__ import annotations

from receiver.remote.spool.chunk_files import PieceFiles
from receiver.remote.spool.directory import StreamFolder
from receiver.remote.streams import SegmentSlice, StreamOffset


class OrphanSpool:
    """What such a process had not sent. One thread. See `receiver.remote.spool.chunk_source.SliceSource`."""

    def __init__(self, folder: StreamFolder) -> None:
        """Takes the folder over.

        Raises:
            OSError: it cannot be read.
        """
        self.key = folder.key
        self._folder = folder
        self._files = PieceFiles(folder)
        self._acked = StreamOffset(0, 0)
        self._sizes = {number: path.stat().st_size for number, path in folder.segments()}

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """The next bytes. Nothing more comes."""
        if self._sizes.get(position.segment, 0) <= position.offset:
            later = [n for n in sorted(self._sizes) if n > position.segment and self._sizes[n]]
            if not later:
                return None
            position = StreamOffset(later[0], 0)
        return self._files.read(position)

    def acked(self, position: StreamOffset) -> None:
        """What is stored elsewhere is deleted."""
        self._acked = max(self._acked, position)
        for number, nbytes in list(self._sizes.items()):
            if (number, nbytes) <= tuple(position):
                del self._sizes[number]
                self._folder.segment(number).unlink(missing_ok=True)

    def is_sent(self) -> bool:
        """Whether all is."""
        return not any(self._sizes.values())

    def end(self) -> None:
        """Removes the folder if all is sent; else leaves it to others."""
        self._files.close()
        if self.is_sent():
            self._folder.remove()
        else:
            self._folder.release()
