"""One stream as a collector has stored it: the segments of a tap log, byte by byte those of the spool."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

from receiver.log import logger
from receiver.remote.collector.segment_validator import SegmentValidator, check_file
from receiver.remote.errors import BadStreamError, GapError
from receiver.remote.streams import START, StreamKey, StreamOffset


class StoredStream:
    """Appends to the files of one stream. Any thread.

    Attributes:
        key: which.
        stored: how far it is in the files.
    """

    def __init__(self, folder: Path, key: StreamKey, *, fsync: bool = False) -> None:
        """Looks how far it is stored already.

        Args:
            folder: where the segments of its run are.
            key: which stream.
            fsync: whether each piece waits for the disk.

        Raises:
            OSError: the files cannot be read.
        """
        self.key = key
        self.stored: StreamOffset = START
        self._folder = folder
        self._fsync = fsync
        self._fd = -1
        self._check: SegmentValidator | None = None
        self._lock = threading.Lock()  # a client that comes back may meet what is left of its last connection
        self._find()

    def path(self, number: int) -> Path:
        """Of one of its segments."""
        return self._folder / self.key.segment_name(number)

    def append(self, position: StreamOffset, data: Any) -> bool:
        """Stores a piece; what has been stored before is left out. False if all of it has.

        Raises:
            GapError: there is something between what is stored and this.
            BadStreamError: it is no segment's.
            OSError: it cannot be written. Nothing of it is stored then.
        """
        with self._lock:
            return self._append(position, data)

    def _append(self, position: StreamOffset, data: Any) -> bool:
        known = self.stored
        if position.segment < known.segment:
            return False
        if position.segment == known.segment:
            if position.offset > known.offset:
                raise GapError(f"{self.key} goes on at {tuple(position)}, and is stored up to {tuple(known)}")
            data = memoryview(data)[known.offset - position.offset :]
            if not data:
                return False
        elif position.offset:
            raise GapError(f"segment {position.segment} of {self.key} does not begin at its beginning")
        else:
            self._begin(position.segment)
        assert self._check is not None
        check = copy.copy(self._check)
        check.take(data)
        self._write(data)
        self._check = check
        self.stored = StreamOffset(self.stored.segment, self.stored.offset + len(data))
        return True

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _find(self) -> None:
        start = self.key.segment_name(0)[: -len("000000.hcblog")]
        numbers = [
            int(path.stem[-6:])
            for path in self._folder.glob(f"{start}*.hcblog")
            if len(path.name) == len(start) + len("000000.hcblog") and path.stem[-6:].isdecimal()
        ]
        if not numbers:
            return
        number = max(numbers)
        path = self.path(number)
        try:
            self._check = check_file(path, self.key, number)
        except BadStreamError as error:
            # A crash of the machine may leave anything. It is fetched once more, if it is still there.
            logger.warning("%s is damaged (%s): begun anew", path, error)
            path.unlink()
            self._check = SegmentValidator(self.key, number)
        self._open(number)

    def _begin(self, number: int) -> None:
        self.close()
        self._check = SegmentValidator(self.key, number)
        self._open(number)

    def _open(self, number: int) -> None:
        self._fd = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.stored = StreamOffset(number, os.fstat(self._fd).st_size)

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.stored.offset)
            raise
