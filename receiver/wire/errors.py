"""Errors of frames that cannot be decoded.

WireError                   a frame cannot be decoded
|-- TruncatedFrameError     it continues beyond the end of the buffer
|-- CorruptFrameError       its bytes contradict the format or each other
|-- UnsupportedVersionError its writer was newer
|-- UnsupportedDtypeError   it has a dtype that this installation lacks
`-- CorruptStreamError      a stretch of a stream holds no frames
"""

from __future__ import annotations

from hostcallback.receiver.errors import HostCallbackError


class WireError(HostCallbackError):
    """A frame cannot be decoded. Only subclasses are raised."""


class TruncatedFrameError(WireError):
    """The frame continues beyond the end of the buffer."""


class CorruptFrameError(WireError):
    """The bytes contradict the format or each other."""


class UnsupportedVersionError(WireError):
    """The frame is of a newer wire format than this package reads."""


class UnsupportedDtypeError(WireError):
    """The frame contains an array of a dtype that this installation does not have."""


class CorruptStreamError(WireError):
    """A stretch of a stream holds no frames; the stream continues after it.

    Attributes:
        skipped: number of messages in that stretch.
    """

    def __init__(self, message: str, skipped: int = 0) -> None:
        """`skipped` is the number of lost messages."""
        super().__init__(message)
        self.skipped = skipped
