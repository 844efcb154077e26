"""What can be wrong with bytes that are said to be frames.

WireError                   a frame, or what is said to be one, cannot be decoded
|-- TruncatedFrameError     it goes on beyond the end of the buffer
|-- CorruptFrameError       its bytes contradict the format or each other
|-- UnsupportedVersionError its writer was newer
|-- UnsupportedDtypeError   it has a dtype that this installation lacks
`-- CorruptStreamError      a stretch of a stream holds no frames
"""

from __future__ import annotations

from receiver.errors import HostCallbackError


class WireError(HostCallbackError):
    """A frame cannot be decoded. Only subclasses are raised."""


class TruncatedFrameError(WireError):
    """The frame goes on beyond the end of the buffer."""


class CorruptFrameError(WireError):
    """The bytes contradict the format or each other."""


class UnsupportedVersionError(WireError):
    """The frame is of a newer wire format than this package reads."""


class UnsupportedDtypeError(WireError):
    """The frame holds an array of a dtype that this installation does not have."""


class CorruptStreamError(WireError):
    """A stretch of a stream holds no frames; the stream goes on behind it.

    Attributes:
        skipped: how many messages were in that stretch.
    """

    def __init__(self, message: str, skipped: int = 0) -> None:
        """`skipped` is how many messages were lost."""
        super().__init__(message)
        self.skipped = skipped
