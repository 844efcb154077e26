"""One stream in a collector's store: the segments of a tap log, byte by byte as in the spool."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver.files import PRIVATE, Permissions
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.collector.segment_validator import SegmentValidator, check_file
from hostcallback.receiver.remote.credentials import BadStreamError, GapError
from hostcallback.receiver.remote.streams import START, StreamKey, StreamOffset, stored_segment


class Known(NamedTuple):
    """The state of a closed stream, for opening it again.

    Attributes:
        stored: end of the stored bytes.
        check: validates the next bytes.
    """

    stored: StreamOffset
    check: SegmentValidator


class StoredStream:
    """Appends to the files of one stream. Any thread.

    Attributes:
        key: the stream.
        stored: end of the stored bytes.
    """

    def __init__(
        self,
        folder: Path,
        key: StreamKey,
        *,
        fsync: bool = False,
        permissions: Permissions = PRIVATE,
        known: Known | None = None,
    ) -> None:
        """Finds the stored bytes of the stream.

        Args:
            folder: of its run's segments.
            key: the stream.
            fsync: whether each slice is synced to the disk.
            permissions: of its files.
            known: the state when it was closed: then its last segment is not validated again.

        Raises:
            OSError: the files cannot be read.
        """
        self.key = key
        self.stored: StreamOffset = START
        self._folder = folder
        self._fsync = fsync
        self._permissions = permissions
        self._fd = -1
        self._check: SegmentValidator | None = None
        # Protects the files: a reconnected client may meet its old connection's write.
        self._lock = threading.Lock()
        if not self._resume(known):
            self._find()

    def path(self, number: int) -> Path:
        """Path of one of its segments."""
        return self._folder / self.key.segment_name(number)

    def append(self, position: StreamOffset, data: Any) -> bool:
        """Stores a slice, without the bytes that are stored already; False if all of them are.

        Raises:
            GapError: bytes between the stored ones and this slice are missing.
            BadStreamError: the slice is not a segment's.
            OSError: it cannot be written. Then none of it is stored.
        """
        with self._lock:
            return self._append(position, data)

    def _append(self, position: StreamOffset, data: Any) -> bool:
        known = self.stored
        if position.segment < known.segment:
            return False
        if position.segment == known.segment:
            if position.offset > known.offset:
                raise GapError(
                    f"{self.key} continues at {tuple(position)}, and is stored up to {tuple(known)}"
                )
            data = memoryview(data)[known.offset - position.offset :]
            if not data:
                return False
        elif position.offset:
            raise GapError(f"segment {position.segment} of {self.key} does not start at its beginning")
        else:
            self._begin(position.segment)
        assert self._check is not None
        # Validates with a copy: if the write fails, the same bytes come again.
        check = copy.copy(self._check)
        check.take(data)
        self._write(data)
        self._check = check
        self.stored = StreamOffset(self.stored.segment, self.stored.offset + len(data))
        return True

    def close(self) -> Known | None:
        """Closes the current segment's file; returns the state, for the next time. None if nothing is stored."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return None if self._check is None else Known(self.stored, self._check)

    def _resume(self, known: Known | None) -> bool:
        if known is None:
            return False
        number, size = known.stored
        if self.path(number + 1).exists():
            return False
        try:
            if self.path(number).stat().st_size != size:
                return False
        except FileNotFoundError:
            return False
        self._check = known.check
        self._open(number)
        return True

    def _find(self) -> None:
        start = f"p{self.key.process:06d}-{self.key.epoch}-*"
        found = [stored_segment(self.key.run, path.name) for path in self._folder.glob(start)]
        numbers = [segment[1] for segment in found if segment is not None and segment[0] == self.key]
        if not numbers:
            return
        number = max(numbers)
        path = self.path(number)
        try:
            self._check = check_file(path, self.key, number)
        except BadStreamError as error:
            # A crash of the machine may leave any bytes. The client sends the segment again if it still has it.
            logger.warning(
                "%s is damaged (%s) and was removed; the stream continues at its beginning", path, error
            )
            path.unlink()
            self._check = SegmentValidator(self.key, number)
        self._open(number)

    def _begin(self, number: int) -> None:
        self.close()
        self._check = SegmentValidator(self.key, number)
        self._open(number)

    def _open(self, number: int) -> None:
        self._fd = self._permissions.open(self.path(number), os.O_WRONLY | os.O_APPEND)
        self.stored = StreamOffset(number, os.fstat(self._fd).st_size)

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.stored.offset)  # a partly written slice would break the offsets
            raise
