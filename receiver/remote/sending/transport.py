"""The interface of transports, which carry the slices of a stream to a collector or a broker."""

from __future__ import annotations

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
