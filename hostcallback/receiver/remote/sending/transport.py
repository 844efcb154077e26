"""The interface of transports to a collector or a broker, and the waits between attempts to reach it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from hostcallback.receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset

OnAck = Callable[[StreamOffset], None]
"""Called with the end of a stream's safely stored bytes, on any thread; never with an earlier position."""


class TransportStream(Protocol):
    """One stream that is being sent. One thread sends.

    Attributes:
        stored: end of the stored bytes when the connection was made. Earlier bytes need not be sent.
    """

    stored: StreamOffset

    def send(self, piece: SegmentSlice) -> None:
        """Sends one slice; slices of a segment follow each other without gaps. May return before the slice is stored.

        Raises:
            TransportError: the connection is broken.
        """

    def check(self) -> None:
        """Raises TransportError if the connection is broken."""

    def close(self) -> None:
        """Ends the sending. Neither raises nor waits."""


class Transport(Protocol):
    """A transport to one collector or broker."""

    def connect(self, key: StreamKey, on_ack: OnAck) -> TransportStream:
        """Starts to send a stream, or continues it.

        Raises:
            StreamRefusedError: the collector refuses the stream.
            TransportError: the collector cannot be reached at present.
        """

    def close(self) -> None:
        """Closes all connections."""


FIRST_BACK_OFF_SEC, LAST_BACK_OFF_SEC = 0.1, 10.0

_random = random.Random()  # separate from the program's generator, which may be seeded


class BackOff:
    """The waiting times of one client. One thread."""

    def __init__(self) -> None:
        """No attempt has failed yet."""
        self.reset()

    def reset(self) -> None:
        """Starts again with the shortest time: an attempt has succeeded."""
        self._seconds = FIRST_BACK_OFF_SEC

    def next_sec(self) -> float:
        """Seconds to wait after a failed attempt."""
        wait_sec = _random.uniform(0.2, 1.0) * self._seconds
        self._seconds = min(2 * self._seconds, LAST_BACK_OFF_SEC)
        return wait_sec
