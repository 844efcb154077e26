"""Finds the segments of growing logs and their new chunks; the fair lock of the index."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hostcallback.receiver.errors import CutOffLogError, NotATapLogError, UnsupportedVersionError
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Unpack, Writer
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

MAX_FOLDERS = 1000
"""Number of subfolders that are searched."""

SETTLED_NS = 2 * 10**9
"""A folder that has not changed for so long has a time of change that tells whether it changes again."""

RELIST_SEC = 30.0
"""Such a folder is listed again after so long all the same: some file systems keep no time of change of folders."""

MAX_PROBLEMS = 100
"""Number of problems (files that are not logs, damaged parts) whose texts are kept."""


@dataclass(slots=True)
class Segment:
    """A segment and how far it was read; also the file for `read_frames`.

    A complete one is opened for each read, so that few files stay open.

    Attributes:
        number: its place among all segments.
        path: of the file.
        writer: the process that wrote it.
        created_ns: when it was begun, Unix nanoseconds.
        reader: it, while it is still written; None once all its chunks are known.
        offset: end of the chunks that were yielded.
        nbytes: length of the file at the last look.
        is_complete: whether it had its end when it was opened, or then.
        devices: names by stream.
        consumers: numbers in the chunks' masks and descriptors, by consumer id; empty once the index has them.
        numbers: the numbers alone.
        config: configuration of the run, as the header has it.
    """

    number: int
    path: Path
    writer: Writer
    created_ns: int
    reader: SegmentReader | None
    offset: int = 0
    nbytes: int = -1
    is_complete: bool = False
    devices: dict[int, str] = field(default_factory=dict)
    consumers: dict[int, tuple[int, TapDescriptor]] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    config: Any = None

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes of the file; fewer at its end."""
        if self.reader is not None:
            return self.reader.read_at(offset, nbytes)
        with self.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), min(nbytes, max(0, size - offset)), offset)

    def chunk_at(self, offset: int) -> Chunk | None:
        """Reads a chunk's header once more; None if the file has changed."""
        header = layout.decode_chunk_header(self.read_at(offset, layout.CHUNK_HEADER_BYTES), offset)
        return None if header is None else Chunk.of(header, self.path.stat().st_size)


class LogFiles:
    """The segments in some folders and files, with those that appear later. One thread.

    Attributes:
        segments: all segments, in the order in which they were found.
        problems: texts about files that are no logs, and about damaged parts; at most `MAX_PROBLEMS`.
    """

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], unpack: Unpack = TapDescriptor.unpack
    ) -> None:
        """Reads nothing yet; `unpack` reads descriptors, see `SegmentReader`.

        Raises:
            OSError: a path does not exist.
            NotATapLogError: a file is no segment of a log.
        """
        self._paths = [layout.existing(path) for path in paths]
        self._unpack = unpack
        for path in self._paths:
            if path.is_file():
                with suppress(CutOffLogError):  # its header is still written
                    SegmentReader(path, unpack).close()
        self._known: dict[Path, Segment | None] = {}
        # Folders of which all segments are known: their time of change, and when they were listed.
        self._listed: dict[Path, tuple[int, float]] = {}
        self.segments: list[Segment] = []
        self.problems: list[str] = []

    def add(self, path: Path) -> bool:
        """Adds a folder or file that may appear later; returns whether it is new."""
        if path in self._paths or len(self._paths) >= MAX_FOLDERS:
            return False
        self._paths.append(path)
        return True

    def find(self) -> None:
        """Looks for new segments."""
        for path in self._paths:
            for folder in self._folders(path):
                try:
                    changed = folder.stat().st_mtime_ns
                    known, listed = self._listed.get(folder, (0, 0.0))
                    if known == changed and time.monotonic() - listed < RELIST_SEC:
                        continue
                    is_settled = time.time_ns() - changed > SETTLED_NS
                    found = layout.segments_of(folder)
                except NotATapLogError:  # a folder without logs so far
                    continue
                except OSError as error:
                    self.note(str(error))
                    continue
                for item in found:
                    if item not in self._known:
                        self._open(item)
                if is_settled and all(item in self._known for item in found):
                    self._listed[folder] = changed, time.monotonic()

    def _folders(self, path: Path) -> list[Path]:
        # The path, and the folders in it: a collector, and who keeps several runs, has a folder for each.
        try:
            with os.scandir(path) as entries:
                inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:  # a segment, or no longer there
            return [path]
        return [path, *map(Path, sorted(inner)[:MAX_FOLDERS])]

    def note(self, problem: str) -> None:
        """Remembers a problem for the page."""
        if len(self.problems) < MAX_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)

    def _open(self, path: Path) -> None:
        try:
            reader = SegmentReader(path, self._unpack)
        except (CutOffLogError, FileNotFoundError):
            return  # its header is still written, or it was deleted: look again later
        except (NotATapLogError, UnsupportedVersionError, OSError) as error:
            self._known[path] = None
            self.note(str(error))
            return
        created = reader.info.get("created_ns")
        segment = Segment(
            len(self.segments), path, reader.writer, created if type(created) is int else 0, reader
        )
        segment.is_complete, segment.config = reader.is_closed(), reader.info.get("config")
        self._known[path] = segment
        self.segments.append(segment)

    def new_chunks(self, segment: Segment) -> list[Chunk]:
        """Returns the chunks that came to a segment since the last call, in order."""
        reader, found = segment.reader, []
        if reader is None:
            return []
        try:
            nbytes = reader.nbytes
            if nbytes == segment.nbytes:
                return []
            for item in reader.chunks(segment.offset):
                if isinstance(item, layout.Damage):
                    if item.torn:
                        break
                    segment.offset = item.offset + item.nbytes
                    self.note(str(item))
                elif item.is_torn:
                    break
                else:
                    segment.offset = item.end
                    found.append(item)
            # A complete file goes on with its index. If it has grown meanwhile, the next look sees all of it.
            closed = segment.offset < nbytes == reader.nbytes and reader.is_closed()
        except OSError as error:
            self.note(str(error))
            segment.reader = None
            return []
        segment.nbytes, segment.is_complete = nbytes, closed
        segment.devices, segment.consumers = reader.devices, reader.consumers
        return found

    def close_complete(self, segment: Segment) -> None:
        """Closes a segment that is complete, after its chunks have been taken."""
        reader = segment.reader
        if reader is not None and segment.is_complete:
            segment.reader = None
            reader.close()


PAUSE_SEC = 0.0005


class FairLock:
    """A reentrant lock. A thread that takes it often calls `let_others` between: Python's locks are unfair."""

    def __init__(self) -> None:
        """The lock is free."""
        self._lock = threading.RLock()
        self._waiting: set[int] = set()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.add(threading.get_ident())
            self._lock.acquire()
            self._waiting.discard(threading.get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def let_others(self) -> None:
        """Lets a waiting thread take the lock. Called without holding it."""
        if self._waiting:
            time.sleep(PAUSE_SEC)
