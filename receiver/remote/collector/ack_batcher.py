"""Acknowledges stored slices to a client: at once after a pause, many together while they come fast."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from hostcallback.receiver.remote import protocol
from hostcallback.receiver.remote.collector.stored_stream import StoredStream

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
