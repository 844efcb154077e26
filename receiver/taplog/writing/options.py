"""How a log is kept, and the count of what it has taken in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FLUSH_BYTES = 256 << 10
FLUSH_SEC = 0.1
"""Messages are written when so many bytes of one device have come, or the first of them so long ago."""

SEGMENT_BYTES = 64 << 20
SEGMENT_SEC = 3600.0


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is kept.

    Attributes:
        segment_bytes: a segment that is longer is finished, and another one begun.
        segment_sec: the same for one that is older, in seconds.
        keep_bytes: when this process's segments are longer together, the oldest ones are deleted; None to keep all.
        compress: whether messages are stored compressed.
        fsync: whether each write waits until it is on the disk, so that it outlives a crash of the machine too.
        process_index: of this process in a program of several.
        flush_bytes: messages of a device are written when they have so many bytes,
        flush_sec: or when the first of them has come so long ago.
        job: names what this process is part of, alike in all processes; empty for a program of one.
    """

    segment_bytes: int = SEGMENT_BYTES
    segment_sec: float = SEGMENT_SEC
    keep_bytes: int | None = None
    compress: bool = False
    fsync: bool = False
    process_index: int | None = None
    flush_bytes: int = FLUSH_BYTES
    flush_sec: float = FLUSH_SEC
    job: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes and times that are not positive."""
        for name in ("segment_bytes", "segment_sec", "keep_bytes", "flush_bytes", "flush_sec"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, expected more than 0")


@dataclass(slots=True)
class LogCounters:
    """What a log has taken in.

    Attributes:
        messages: written.
        nbytes: of the segments, written so far, deleted ones included.
        lost_messages: that could not be written.
        lost_bytes: theirs.
        lost_by_device: the same messages, by the device's name.
        failure: why, the last time; empty if nothing failed.
    """

    messages: int = 0
    nbytes: int = 0
    lost_messages: int = 0
    lost_bytes: int = 0
    lost_by_device: Counter[str] = field(default_factory=Counter)
    failure: str = ""
