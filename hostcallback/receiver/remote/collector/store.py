"""All streams of a collector in a folder, which is a tap log for each run, and acknowledgements of what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from pathlib import Path

from hostcallback.receiver import limits
from hostcallback.receiver.files import PRIVATE, Permissions
from hostcallback.receiver.processes import is_run
from hostcallback.receiver.remote import protocol
from hostcallback.receiver.remote.collector.stored_stream import Known, StoredStream
from hostcallback.receiver.remote.credentials import BadStreamError, RemoteError
from hostcallback.receiver.remote.streams import StreamKey, StreamOffset, stored_segment


class Store:
    """The collector's folder, locked against other collectors.

    Attributes:
        directory: the folder.
        fsync: whether each slice is synced to the disk before it is acknowledged.
        permissions: of the files and folders that it creates.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, fsync: bool = False, permissions: Permissions = PRIVATE
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
        self._lock = PRIVATE.open(self.directory / ".collector", os.O_RDWR)
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
            if not is_run(folder.name) or not folder.is_dir():
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
            await self._write(protocol.encode_position(self._stream.stored))

    def _forget_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
