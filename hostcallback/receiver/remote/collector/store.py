"""A collector's streams in a folder, each the segments of a tap log, and acknowledgements of what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver import files, limits, processes
from hostcallback.receiver.errors import BadStreamError, GapError, RemoteError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.collector.segment_validator import SegmentValidator, check_file
from hostcallback.receiver.remote.forwarding_protocol import START, StreamKey, StreamOffset, stored_segment


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
        permissions: files.Permissions = files.PRIVATE,
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


class Store:
    """The collector's folder, locked against other collectors.

    Attributes:
        directory: the folder.
        fsync: whether each slice is synced to the disk before it is acknowledged.
        permissions: of the files and folders that it creates.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        fsync: bool = False,
        permissions: files.Permissions = files.PRIVATE,
    ) -> None:
        """Creates the folder if it does not exist, and locks it.

        Raises:
            RemoteError: another collector uses it.
            OSError: it cannot be created.
        """
        self.directory = Path(directory)
        self.fsync = fsync
        self.permissions = permissions
        self._streams: dict[StreamKey, StoredStream] = {}
        self._closed: OrderedDict[StreamKey, Known] = OrderedDict()
        self._opening = threading.Lock()  # protects the open and the closed streams
        permissions.make_folder(self.directory)
        self._lock = files.PRIVATE.open(self.directory / ".collector", os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RemoteError(
                f"{self.directory}: another collector stores there; end it first, or name another folder with --log"
            ) from None

    def open(self, key: StreamKey) -> StoredStream:
        """Opens a stream; the same object until `forget`. Any thread. Validates its last segment, if it is not known.

        Raises:
            BadStreamError: the collector has as many streams as it may have.
            OSError: its files cannot be read or created.
        """
        with self._opening:
            found = self._streams.get(key)
            if found is None:
                self._admit(key)
                folder = self.folder(key.run)
                self.permissions.make_folder(folder)
                known = self._closed.pop(key, None)
                found = self._streams[key] = StoredStream(
                    folder, key, fsync=self.fsync, permissions=self.permissions, known=known
                )
            return found

    def _admit(self, key: StreamKey) -> None:
        if key in self._known:
            return
        if len(self._known) >= limits.STREAMS:
            raise BadStreamError(
                f"the collector stores {limits.STREAMS} streams already: move old runs out of {self.directory}, and "
                "start it again"
            )
        self._known.add(key)

    @cached_property
    def _known(self) -> set[StreamKey]:
        return {key for key, _, _ in self._segments()}

    def forget(self, key: StreamKey) -> None:
        """Closes the files of a stream that no client sends any more."""
        with self._opening:
            found = self._streams.pop(key, None)
            closed = None if found is None else found.close()
            if closed is not None:
                self._closed[key] = closed
                if len(self._closed) > limits.STREAMS_KEPT:
                    self._closed.popitem(last=False)

    def folder(self, run: str) -> Path:
        """Folder of a run's segments."""
        return self.directory / run

    def close(self) -> None:
        """Closes all files and unlocks the folder."""
        for key in list(self._streams):
            self.forget(key)
        os.close(self._lock)

    def stored(self) -> dict[StreamKey, StreamOffset]:
        """End of the stored bytes of each stream that has files."""
        found: dict[StreamKey, StreamOffset] = {}
        for key, number, path in self._segments():
            if number >= found.get(key, StreamOffset(0, 0)).segment:
                found[key] = StreamOffset(number, path.stat().st_size)
        return found

    def _segments(self) -> Iterator[tuple[StreamKey, int, Path]]:
        for folder in sorted(self.directory.iterdir()):
            if not processes.is_run(folder.name) or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                found = stored_segment(folder.name, path.name)
                if found is not None and path.is_file():
                    yield *found, path


ACK_SEC = 0.02
ACK_BYTES = 2 << 20
"""Limits of an acknowledgement batch: seconds since the last one, and bytes stored since (a quarter of a client's
window, so that a client never waits for room)."""


class AckBatcher:
    """Acknowledges one stream; an asynchronous context manager. Runs in the collector's event loop."""

    def __init__(self, stream: StoredStream, write: Callable[[bytes], Awaitable[None]]) -> None:
        """`write` sends a message to the client."""
        self._stream = stream
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._nbytes = 0
        self._ends = False

    async def __aenter__(self) -> AckBatcher:
        """Starts the task that writes acknowledgements."""
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends the task; without an exception, it first acknowledges once more."""
        if kind is None:
            self._ends = True
            self._due.set()
            await self._task  # not cancelled: it may be writing, and gRPC takes one message at a time
            return
        self._task.cancel()
        # The stream has failed already, and its error is raised. A failure to acknowledge follows from it.
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task
        self._forget_timer()

    def stored(self, nbytes: int) -> None:
        """Notes that `nbytes` more of the stream are stored now, or were before."""
        self._nbytes += nbytes
        if self._nbytes >= ACK_BYTES:
            self._due.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._last + ACK_SEC, self._due.set)

    async def _run(self) -> None:
        ends = False
        while not ends:
            await self._due.wait()
            self._due.clear()
            ends = self._ends
            self._forget_timer()
            self._nbytes = 0
            self._last = self._loop.time()
            await self._write(forwarding_protocol.encode_position(self._stream.stored))

    def _forget_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
