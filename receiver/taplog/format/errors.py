"""What is wrong with a log: the errors that end reading it, and the records of what was skipped or lost.

TapLogError          a log cannot be read or written
|-- NotATapLogError  a file or folder is no tap log
|   `-- CutOffLogError   a file ends before a segment's header does
`-- DamagedLogError  a log was read, but for the parts that are damaged
A log of a newer version raises `receiver.wire.UnsupportedVersionError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from receiver.errors import HostCallbackError


class TapLogError(HostCallbackError):
    """A tap log cannot be read or written."""


class NotATapLogError(TapLogError):
    """A file is no segment of a tap log, or a folder has none."""


class CutOffLogError(NotATapLogError):
    """A file ends before a segment's header does: its writer was killed in that moment, or it was cut off."""


class DamagedLogError(TapLogError):
    """Parts of a log are damaged. What is good in it has been read."""


class Damage(NamedTuple):
    """A stretch of a segment that could not be read. Reading goes on behind it.

    Attributes:
        path: of the segment.
        offset: where in the file it begins.
        nbytes: how long it is.
        messages: how many messages were in it; -1 if nobody knows.
        reason: what is wrong with it.
        torn: whether the file just ends in it, as it does where its writer was killed, or is writing.
    """

    path: Path
    offset: int
    nbytes: int
    messages: int
    reason: str
    torn: bool = False

    def __str__(self) -> str:
        """One line."""
        count = f" with {self.messages} message(s)" if self.messages >= 0 else ""
        return f"{self.path}: {self.reason}: skipped {self.nbytes} bytes{count} at offset {self.offset}"


class Lost(NamedTuple):
    """Messages of one device that its log says are missing.

    Attributes:
        device: its name, such as `cpu:0`.
        first_seq: of the first of them.
        last_seq: of the last; numbers between may be there all the same.
        messages: how many they are.
        nbytes: how many bytes they had; 0 if nobody knows.
        time_ns: Unix time at which the loss was written down.
        reason: why.
    """

    device: str
    first_seq: int
    last_seq: int
    messages: int
    nbytes: int
    time_ns: int
    reason: str
