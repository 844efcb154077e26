"""The interface of slice sources: this process's spool, or an orphan spool."""

from __future__ import annotations

from typing import Protocol

from hostcallback.receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset


class SliceSource(Protocol):
    """A stream that a sender sends.

    Attributes:
        key: identifies the stream.
        sent_before: end of what another sender may have sent of it.
    """

    key: StreamKey
    sent_before: StreamOffset

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """Returns the next slice from `position` on; None if none came in `timeout_sec`.

        The slice starts elsewhere if a new segment starts, or if the data at `position` was dropped.
        """

    def acked(self, position: StreamOffset) -> None:
        """Notes that everything before `position` is safely stored by the collector."""

    def is_sent(self) -> bool:
        """Whether the collector has stored all data so far."""
