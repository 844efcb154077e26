"""What carries the pieces of a stream to where they are stored: gRPC, or another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset

OnAck = Callable[[StreamOffset], None]
"""Called with how far a stream is safely stored, on any thread; never backwards."""


class TransportStream(Protocol):
    """One stream on its way. One thread sends.

    Attributes:
        stored: how far the stream was stored when the link was made. What comes before need not be sent.
    """

    stored: StreamOffset

    def send(self, piece: SegmentSlice) -> None:
        """Sends one piece; pieces of a segment follow each other without gaps. May return before it is stored.

        Raises:
            LinkError: the link is broken.
        """

    def check(self) -> None:
        """Raises LinkError if the link is broken."""

    def close(self) -> None:
        """Ends it. Does not raise, nor wait."""


class Transport(Protocol):
    """Where streams are stored."""

    def connect(self, key: StreamKey, on_ack: OnAck) -> TransportStream:
        """Begins to send a stream, or goes on with it.

        Raises:
            LinkRefusedError: the stream is not wanted there.
            LinkError: there is nobody at present.
        """

    def close(self) -> None:
        """Ends everything."""
