"""Limits on a client's use of a collector."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from hostcallback.receiver.remote.collector.refusal import Code, Refused


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on clients.

    Attributes:
        streams: simultaneous streams of all clients.
        streams_per_peer: simultaneous streams of one address.
        bytes_per_sec: of one stream; 0 for no limit.
        hello_sec: seconds in which a client must send its first message; otherwise the collector refuses it.
        unannounced: simultaneous calls without a first message. They are no streams yet. Beyond it, the oldest call of
            the address with most of them is refused, so that such calls keep no other client out.
    """

    streams: int = 4096
    streams_per_peer: int = 1024
    bytes_per_sec: float = 0.0
    hello_sec: float = 10.0
    unannounced: int = 1024


class SlotLimiter:
    """Counts simultaneous calls, in total and per address. Runs in the collector's event loop."""

    def __init__(self, limits: Limits) -> None:
        """No call is counted yet; `limits` has the maximum numbers of streams."""
        self._limits = limits
        self._peers: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, peer: str) -> Iterator[None]:
        """Counts a call of a client, named as gRPC does, while the context is entered.

        Raises:
            Refused: a limit is reached.
        """
        host = peer.rpartition(":")[0]
        if self._peers.total() >= self._limits.streams or self._peers[host] >= self._limits.streams_per_peer:
            raise Refused(Code.RESOURCE_EXHAUSTED, "the collector's limit of simultaneous streams is reached")
        self._peers[host] += 1
        try:
            yield
        finally:
            self._peers[host] -= 1
            if not self._peers[host]:
                del self._peers[host]


class HelloLimiter:
    """Limits the calls that have not said which stream they send. Runs in the collector's event loop."""

    def __init__(self, limits: Limits) -> None:
        """No call waits; `limits` has the number and the time."""
        self._limits = limits
        self._waiting: dict[str, list[asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def waiting(self, peer: str) -> AsyncIterator[None]:
        """Counts a call of a client, named as gRPC does, while the context is entered.

        Raises:
            TimeoutError: its time is over, or it had to make room for others.
        """
        host = peer.rpartition(":")[0]
        async with asyncio.timeout(self._limits.hello_sec) as limit:
            calls = self._waiting.setdefault(host, [])
            calls.append(limit)
            try:
                if sum(map(len, self._waiting.values())) > self._limits.unannounced:
                    oldest = max(self._waiting.values(), key=len).pop(0)
                    oldest.reschedule(asyncio.get_running_loop().time())
                yield
            finally:
                if limit in calls:
                    calls.remove(limit)
                if not calls and self._waiting.get(host) is calls:
                    del self._waiting[host]


class Rate:
    """Limits the rate of a stream. A stream may be ahead by at most one second's bytes."""

    def __init__(self, bytes_per_sec: float) -> None:
        """0 for no limit."""
        self._rate = bytes_per_sec
        self._due = 0.0

    def wait_sec(self, nbytes: int) -> float:
        """Counts received bytes, and returns the seconds to wait before more may be taken."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + nbytes / self._rate
        return max(0.0, self._due - now)
