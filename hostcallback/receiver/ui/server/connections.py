"""Connections of browsers: limited in number, and each has to send its request soon. None needs a token to connect."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SEC = 5.0
"""Seconds within which a connection has to send the head of a request, and finish a TLS handshake."""

MAX_CONNECTIONS = 128

HAS_TOKEN = "hostcallback.has_token"
"""Key of a request's scope: it came with a valid token."""


def most_connections() -> int:
    """How many connections there may be: at most an eighth of this process's files, which a collector needs, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else max(8, min(MAX_CONNECTIONS, files // 8))


class Connection(H11Protocol):
    """One connection. Where there are too many, the oldest one whose request had no token is closed."""

    def connection_made(self, transport: Any) -> None:
        """Takes a new connection, in place of another one if there are too many."""
        self.timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._watch()
        self.since = self.loop.time()
        living: list[Any] = [other for other in self.connections if not other.transport.is_closing()]
        if len(living) > most_connections():
            unknown = [other for other in living if other is not self and not other.has_token()]
            min(unknown, key=lambda other: other.since, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes bytes. Those of a head do not extend its time."""
        super().data_received(data)
        self._watch()

    def has_token(self) -> bool:
        """Whether its last request came with a valid token."""
        return bool(self.scope and self.scope.get(HAS_TOKEN))

    def _watch(self) -> None:
        if not self._waits():
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(HEAD_SEC, self._late)

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _late(self) -> None:
        self.timer = None
        if self._waits():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
