"""Orphan spools: finds the spools of dead processes, and reads one, so that another process can send it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hostcallback.receiver.remote.spool.directory import StreamFolder
from hostcallback.receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset


def find_orphans(spool: Path, run: str) -> list[StreamFolder]:
    """Locks and returns the stream folders that dead processes of a run left, the oldest first."""
    # The oldest first: their messages were emitted before those of later processes.
    return sorted(_taken(spool, lambda key: key.run == run), key=_begun)


def left_by_other_runs(spool: Path, run: str) -> dict[str, int]:
    """Returns by run the bytes that dead processes of other runs left, as far as they can be read."""
    found: dict[str, int] = {}
    for folder in _taken(spool, lambda key: key.run != run):
        with contextlib.suppress(OSError):
            nbytes = sum(segment.stat().st_size for _, segment in folder.segments())
            found[folder.key.run] = found.get(folder.key.run, 0) + nbytes
        folder.release()
    return found


def _taken(spool: Path, is_wanted: Callable[[StreamKey], bool]) -> Iterator[StreamFolder]:
    # Another process may remove or take a folder at any time. A process must start even if no orphan can be read.
    with contextlib.suppress(OSError):
        for path in spool.iterdir():
            key = StreamKey.of_folder(path.name)
            if key is None or not is_wanted(key):
                continue
            with contextlib.suppress(OSError):
                folder = StreamFolder.take(path)
                if folder is not None:
                    yield folder


def _begun(folder: StreamFolder) -> int:
    with contextlib.suppress(OSError):
        return folder.path.stat().st_mtime_ns
    return 0


class OrphanSpool:
    """The unsent data of a dead process. One thread. See `hostcallback.receiver.remote.sending.sender.SliceSource`."""

    def __init__(self, folder: StreamFolder) -> None:
        """Takes ownership of the locked folder.

        Raises:
            OSError: it cannot be read.
        """
        self.key = folder.key
        self._folder = folder
        self._sizes = {number: path.stat().st_size for number, path in folder.segments()}
        last = max(self._sizes, default=0)
        # The dead process may have sent all of it.
        self.sent_before = StreamOffset(last, self._sizes.get(last, 0))

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """Returns the next slice. Never waits: the stream does not grow any more."""
        if self._sizes.get(position.segment, 0) <= position.offset:
            later = [n for n in sorted(self._sizes) if n > position.segment and self._sizes[n]]
            if not later:
                return None
            position = StreamOffset(later[0], 0)
        return self._folder.read(position)

    def acked(self, position: StreamOffset) -> None:
        """Deletes the segments before `position`, which the collector has stored."""
        for number, nbytes in list(self._sizes.items()):
            if (number, nbytes) <= tuple(position):
                del self._sizes[number]
                self._folder.segment(number).unlink(missing_ok=True)

    def is_sent(self) -> bool:
        """Whether the collector has stored all of it."""
        return not any(self._sizes.values())

    def end(self) -> None:
        """Removes the folder if all data is stored, otherwise unlocks it for another process."""
        if self.is_sent():
            self._folder.remove()
        else:
            self._folder.release()
