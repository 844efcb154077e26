"""Where the pieces of a stream come from: the spool of this process, or one that a process left behind."""

from __future__ import annotations

from typing import Protocol

from receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset


class SliceSource(Protocol):
    """A stream that is to be sent.

    Attributes:
        key: whose it is.
    """

    key: StreamKey

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """The next bytes from `position` on; None when none came in that time.

        Their position is another one where a segment begins, or what was there was dropped.
        """

    def acked(self, position: StreamOffset) -> None:
        """Everything before `position` is safely stored elsewhere."""

    def is_sent(self) -> bool:
        """Whether all there is so far is stored elsewhere."""
