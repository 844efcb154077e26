"""What one client may use of a collector."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from receiver.remote.collector.refusal import Code, Refused


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds.

    Attributes:
        streams: at a time, over all clients.
        streams_per_peer: at a time, of one address.
        bytes_per_sec: of one stream; 0 for any.
        hello_sec: a client that has not said who it is by then is sent away.
    """

    streams: int = 4096
    streams_per_peer: int = 1024
    bytes_per_sec: float = 0.0
    hello_sec: float = 10.0


class SlotLimiter:
    """How many calls there are at a time, over all clients and of each address. In the collector's event loop."""

    def __init__(self, limits: Limits) -> None:
        """None so far; as many as `limits` has streams."""
        self._limits = limits
        self._peers: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, peer: str) -> Iterator[None]:
        """Within it, a client (as gRPC names it) has one.

        Raises:
            Refused: there is none left.
        """
        host = peer.rpartition(":")[0]
        if self._peers.total() >= self._limits.streams or self._peers[host] >= self._limits.streams_per_peer:
            raise Refused(Code.RESOURCE_EXHAUSTED, "the collector has as many streams as it may")
        self._peers[host] += 1
        try:
            yield
        finally:
            self._peers[host] -= 1
            if not self._peers[host]:
                del self._peers[host]


class Rate:
    """How long to wait so that a stream keeps to its rate, a second's worth ahead at most."""

    def __init__(self, bytes_per_sec: float) -> None:
        """0 for any."""
        self._rate = bytes_per_sec
        self._due = 0.0

    def wait_sec(self, nbytes: int) -> float:
        """Accounts for bytes; how long to wait before more are taken."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + nbytes / self._rate
        return max(0.0, self._due - now)
