"""Where the pieces of a stream come from: the spool of this process, or one that a process left behind."""

from __future__ import annotations

from typing import Protocol

from receiver.remote.streams import Piece, Position, StreamKey


class PieceSource(Protocol):
    """A stream that is to be sent.

    Attributes:
        key: whose it is.
    """

    key: StreamKey

    def read(self, position: Position, timeout_sec: float) -> Piece | None:
        """The next bytes from `position` on; None when none came in that time.

        Their position is another one where a segment begins, or what was there was dropped.
        """

    def acked(self, position: Position) -> None:
        """Everything before `position` is safely stored elsewhere."""

    def is_sent(self) -> bool:
        """Whether all there is so far is stored elsewhere."""
