"""All streams of a collector, in a folder: one folder for each run, a tap log that every command reads."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from receiver.remote.collector.stored_stream import StoredStream
from receiver.remote.errors import RemoteError
from receiver.remote.streams import StreamKey, StreamOffset, is_run

_SEGMENT = re.compile(r"p(\d{6,10})-([0-9a-f]{16})-(\d{6})\.hcblog")


class Store:
    """The folder, which no other collector has meanwhile.

    Attributes:
        directory: the folder.
        fsync: whether each piece waits for the disk.
    """

    def __init__(self, directory: str | os.PathLike[str], *, fsync: bool = False) -> None:
        """Makes the folder if there is none.

        Raises:
            RemoteError: another collector has it.
            OSError: it cannot be made.
        """
        self.directory = Path(directory)
        self.fsync = fsync
        self._streams: dict[StreamKey, StoredStream] = {}
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / ".collector", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RemoteError(
                f"{self.directory}: another collector stores there; end it first, or give --log another folder"
            ) from None

    def open(self, key: StreamKey) -> StoredStream:
        """A stream, as far as it is stored; the same object each time.

        Raises:
            OSError: its files cannot be read or made.
        """
        found = self._streams.get(key)
        if found is None:
            folder = self.folder(key.run)
            folder.mkdir(exist_ok=True)
            found = self._streams[key] = StoredStream(folder, key, fsync=self.fsync)
        return found

    def forget(self, key: StreamKey) -> None:
        """Closes the files of a stream that nobody sends at present."""
        found = self._streams.pop(key, None)
        if found is not None:
            found.close()

    def folder(self, run: str) -> Path:
        """Where the segments of a run are."""
        return self.directory / run

    def close(self) -> None:
        """Closes all files, and leaves the folder to others."""
        for key in list(self._streams):
            self.forget(key)
        os.close(self._lock)

    def stored(self) -> dict[StreamKey, StreamOffset]:
        """How far each stream that has files is stored."""
        found: dict[StreamKey, StreamOffset] = {}
        for key, number, path in self._segments():
            if number >= found.get(key, StreamOffset(0, 0)).segment:
                found[key] = StreamOffset(number, path.stat().st_size)
        return found

    def segments(self, key: StreamKey) -> list[tuple[int, Path]]:
        """The segments of a stream that are there, by number."""
        return sorted((number, path) for found, number, path in self._segments(key.run) if found == key)

    def _segments(self, only: str = "") -> Iterator[tuple[StreamKey, int, Path]]:
        for folder in sorted(self.directory.iterdir()):
            if not is_run(folder.name) or (only and folder.name != only) or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                found = _SEGMENT.fullmatch(path.name)
                if found is not None:
                    yield StreamKey(folder.name, int(found[1]), found[2]), int(found[3]), path
