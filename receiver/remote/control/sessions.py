"""Sessions with the processes that a collector can reach, and their pending requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from hostcallback.receiver.remote.collector.refusal import Code, Refused
from hostcallback.receiver.remote.control.protocol import Controlled, decode_answer, encode_request
from hostcallback.receiver.remote.errors import BadStreamError
from hostcallback.receiver.remote.streams import StreamKey

MAX_UNANSWERED = 256
"""Limit of unanswered requests, beyond which a process is disconnected. When it reconnects it receives all rules."""

NOBODY = 0
"""Session number of the collector's own requests."""


class ProcessSession:
    """The session with one process. Runs in the collector's event loop.

    Attributes:
        process: the process.
        ended: resolved with the reason when the collector ends the session.
    """

    def __init__(self, process: Controlled) -> None:
        """The process has just connected."""
        self.process = process
        self.ended: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()  # None ends it
        self._is_gone = False
        self._last = 0
        self._unanswered: dict[int, tuple[int, asyncio.Future[bytes | None]]] = {}
        self._sessions: Counter[int] = Counter()  # unanswered requests, by client session

    def request(self, session: int, line: bytes) -> asyncio.Future[bytes | None]:
        """Sends a request. The future gets the answer, or None when none can come any more."""
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        if self.ended.done():
            future.set_result(None)
            return future
        self._last += 1
        self._unanswered[self._last] = session, future
        self._sessions[session] += 1
        self._outgoing.put_nowait(encode_request(session, self._last, line))
        if len(self._unanswered) > MAX_UNANSWERED:
            self.end(Code.RESOURCE_EXHAUSTED, "the process does not answer")
        return future

    def is_behind(self, session: int) -> bool:
        """Whether a client session has unanswered requests."""
        return bool(self._sessions[session])

    def close_session(self, session: int) -> None:
        """Ends a client session, and tells the process if it knows the session."""
        if session in self._sessions:
            del self._sessions[session]
            self._outgoing.put_nowait(encode_request(session, 0, b""))

    def answered(self, data: bytes) -> None:
        """Takes an answer.

        Raises:
            BadStreamError: the data is not an answer, or answers no pending request.
        """
        number, line = decode_answer(data)
        session, future = self._unanswered.pop(number, (NOBODY, None))
        if future is None:
            raise BadStreamError(f"there is no request {number}")
        if session in self._sessions:
            self._sessions[session] -= 1
        if not future.done():
            future.set_result(line)

    def end(self, code: object, text: str) -> None:
        """Has the collector end the session, with a status and a reason."""
        if not self.ended.done():
            self.ended.set_result(Refused(code, text))

    def gone(self) -> None:
        """Resolves all pending requests with None: the process has disconnected."""
        self.end(Code.UNAVAILABLE, "the process has disconnected")
        self._is_gone = True
        for _, future in self._unanswered.values():
            if not future.done():
                future.set_result(None)
        self._unanswered.clear()
        self._outgoing.put_nowait(None)

    async def requests(self) -> AsyncIterator[bytes]:
        """Yields the requests to send, until the process disconnects."""
        while (request := await self._outgoing.get()) is not None and not self._is_gone:
            yield request


class ProcessSessions:
    """The sessions of all processes, one per stream."""

    def __init__(self) -> None:
        """No process is connected."""
        self._links: dict[StreamKey, ProcessSession] = {}

    def add(self, link: ProcessSession) -> None:
        """Adds a session, and ends an older one of the same stream."""
        older = self._links.pop(link.process.key, None)
        if older is not None:
            older.end(Code.ABORTED, f"a newer connection of {link.process}")
        self._links[link.process.key] = link

    def remove(self, link: ProcessSession) -> None:
        """Removes the session of a process that has disconnected."""
        link.gone()
        if self._links.get(link.process.key) is link:
            del self._links[link.process.key]

    def all(self) -> Iterable[ProcessSession]:
        """All sessions."""
        return tuple(self._links.values())

    def processes(self) -> list[ProcessSession]:
        """One session per process, by run and number: of a process with several streams, the session added last."""
        found = {link.process.instance: link for link in self._links.values()}
        return [found[instance] for instance in sorted(found)]
