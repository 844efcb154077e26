"""The folders of spools, one per stream, locked by their processes; those of dead processes are found and read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from hostcallback.receiver import errors, files, processes
from hostcallback.receiver.remote.forwarding_protocol import (
    PIECE_BYTES,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)

LOCK = "lock"
SUFFIX = ".hcblog"


@contextlib.contextmanager
def making(spool: Path) -> Iterator[None]:
    """Turns an OSError inside the context into a SpoolError that names the cure."""
    try:
        yield
    except OSError as error:
        raise errors.SpoolError(
            f"the spool is {spool}, and nothing can be written there ({error.strerror or error}): give spool= a folder "
            "on a disk of this machine that has room and that this user may write to"
        ) from error


class StreamFolder:
    """The folder of one stream, locked against other processes while this object lives.

    Attributes:
        key: identifies the stream.
        path: of the folder.
    """

    def __init__(self, key: StreamKey, path: Path, lock: int) -> None:
        """Called by `make` and `take`."""
        self.key = key
        self.path = path
        self._lock = lock
        self._reading = 0, -1  # number of the segment that is open for reading, and its descriptor
        _open_folders.add(self)

    @classmethod
    def make(cls, spool: Path, key: StreamKey) -> StreamFolder:
        """Creates the folder of a new stream.

        Raises:
            SpoolError: it cannot be created.
        """
        path, new = spool / key.folder, spool / f".new-{key.folder}"
        with making(spool):
            files.PRIVATE.make_folder(spool)
            new.mkdir(mode=0o700)
            lock = _lock(new)
            assert lock is not None, "another process has locked a folder with a random name"
            new.rename(path)  # after the lock: other processes look for folders without locks
        return cls(key, path, lock)

    @classmethod
    def take(cls, path: Path) -> StreamFolder | None:
        """Locks the folder that another process left; None if that process lives, or the folder is not a stream's.

        Raises:
            OSError: the folder cannot be read.
        """
        key = StreamKey.of_folder(path.name)
        if key is None or not path.is_dir() or not (path / LOCK).exists():
            return None
        lock = _lock(path)
        if lock is None:
            return None
        if not (path / LOCK).exists():  # its owner removed it between the two checks
            os.close(lock)
            return None
        return cls(key, path, lock)

    def segment(self, number: int) -> Path:
        """Path of a segment."""
        return self.path / f"{number:06d}{SUFFIX}"

    def segments(self) -> list[tuple[int, Path]]:
        """Existing segments, by number."""
        found = [path for path in self.path.iterdir() if path.suffix == SUFFIX and path.stem.isdecimal()]
        return sorted((int(path.stem), path) for path in found)

    def read(self, position: StreamOffset, nbytes: int = PIECE_BYTES) -> SegmentSlice:
        """Reads up to `nbytes` at `position`, at most `PIECE_BYTES` and at most to the segment's end. One thread.

        Raises:
            OSError: the segment cannot be read.
        """
        if self._reading[0] != position.segment:
            self._stop_reading()
            descriptor = os.open(self.segment(position.segment), os.O_RDONLY | os.O_CLOEXEC)
            self._reading = position.segment, descriptor
        data = os.pread(self._reading[1], min(nbytes, PIECE_BYTES), position.offset)
        return SegmentSlice(position, data)

    def _stop_reading(self) -> None:
        (_, descriptor), self._reading = self._reading, (0, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def remove(self) -> None:
        """Removes the folder and its content. Never raises."""
        with contextlib.suppress(OSError):
            for _, path in self.segments():
                path.unlink()
            # Last of the files, and still locked: no other process may take the folder while it is being removed.
            (self.path / LOCK).unlink()
            self.path.rmdir()
        self.release()

    def release(self) -> None:
        """Unlocks the folder, so that another process can take it. It is not read any more."""
        self._stop_reading()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _lock(path: Path) -> int | None:
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # `flock` and not `lockf`: the latter's locks end when the process closes any descriptor of the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


_open_folders: weakref.WeakSet[StreamFolder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A lock lasts as long as any process has its descriptor, so the child must close its parent's.
    for folder in list(_open_folders):
        folder.release()


processes.in_child(processes.Stage.REMOTE, _after_fork_in_child)


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
