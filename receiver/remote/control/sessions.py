"""The processes that a collector can reach, and the requests that are on their way to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from receiver.remote.collector.refusal import Code, Refused
from receiver.remote.control.protocol import Controlled, decode_answer, encode_request
from receiver.remote.errors import BadStreamError
from receiver.remote.streams import StreamKey

MAX_UNANSWERED = 256
"""A process that leaves so many requests without an answer is sent away. When it comes again it gets all that holds."""

NOBODY = 0
"""In place of a session: the collector itself asks."""


class ProcessSession:
    """One process. In the collector's event loop.

    Attributes:
        process: who it is.
        ended: has the reason when the collector is to end it.
    """

    def __init__(self, process: Controlled) -> None:
        """It has just come."""
        self.process = process
        self.ended: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: nothing more
        self._is_gone = False
        self._last = 0
        self._unanswered: dict[int, tuple[int, asyncio.Future[bytes | None]]] = {}
        self._sessions: Counter[int] = Counter()  # requests without an answer, by session

    def request(self, session: int, line: bytes) -> asyncio.Future[bytes | None]:
        """Sends a request; the future has the answer, or None if none will come."""
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
        """Whether a session's last request has no answer yet."""
        return bool(self._sessions[session])

    def close_session(self, session: int) -> None:
        """A session is over: tells the process, if it knows of it."""
        if session in self._sessions:
            del self._sessions[session]
            self._outgoing.put_nowait(encode_request(session, 0, b""))

    def answered(self, data: bytes) -> None:
        """Takes an answer.

        Raises:
            BadStreamError: it is none, or to no request.
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
        """Has it sent away."""
        if not self.ended.done():
            self.ended.set_result(Refused(code, text))

    def gone(self) -> None:
        """No answers come any more."""
        self.end(Code.UNAVAILABLE, "the process has gone")
        self._is_gone = True
        for _, future in self._unanswered.values():
            if not future.done():
                future.set_result(None)
        self._unanswered.clear()
        self._outgoing.put_nowait(None)

    async def requests(self) -> AsyncIterator[bytes]:
        """What is to be sent, as it comes, until it is gone."""
        while (request := await self._outgoing.get()) is not None and not self._is_gone:
            yield request


class ProcessSessions:
    """All of them, one for each stream."""

    def __init__(self) -> None:
        """None yet."""
        self._links: dict[StreamKey, ProcessSession] = {}

    def add(self, link: ProcessSession) -> None:
        """A process has come; an older connection of it is ended."""
        older = self._links.pop(link.process.key, None)
        if older is not None:
            older.end(Code.ABORTED, f"a newer connection of {link.process}")
        self._links[link.process.key] = link

    def remove(self, link: ProcessSession) -> None:
        """It is gone."""
        link.gone()
        if self._links.get(link.process.key) is link:
            del self._links[link.process.key]

    def all(self) -> Iterable[ProcessSession]:
        """Every one."""
        return tuple(self._links.values())

    def processes(self) -> list[ProcessSession]:
        """One for each process: it may have several streams, the last of which stands for it. By run and number."""
        found = {link.process.instance: link for link in self._links.values()}
        return [found[instance] for instance in sorted(found)]
