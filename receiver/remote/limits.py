"""What one client may use of a collector."""

from __future__ import annotations

import time
from dataclasses import dataclass


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
