"""Streams: the identity of a forwarded spool, positions in it, and the slices that are sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from hostcallback.receiver.processes import EXPECTED, is_run
from hostcallback.receiver.remote.credentials import BadStreamError

PIECE_BYTES = 1 << 20
"""Largest slice in bytes."""

_EPOCH = re.compile(r"[0-9a-f]{16}")
_SEGMENT = re.compile(rf"p(\d{{6,10}})-({_EPOCH.pattern})-(\d{{6}})\.hcblog")
_FOLDER = re.compile(rf"([^~]{{1,64}})~(\d{{1,10}})~({_EPOCH.pattern})")

MAX_PROCESS = 2**31 - 1
MAX_SEGMENT = 10**6 - 1
MAX_OFFSET = 2**53


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Identity of a stream. Its fields are checked, so that they are safe as file names.

    Attributes:
        run: name of the program's run, equal in all its processes.
        process: number of the process in the run.
        epoch: distinguishes the starts of the process, and its spools.
    """

    run: str
    process: int
    epoch: str

    def __post_init__(self) -> None:
        """Raises BadStreamError for an invalid field."""
        process = self.process
        if not is_run(self.run):
            raise BadStreamError(f"the run is {str(self.run)[:80]!r}, expected {EXPECTED}")
        if not isinstance(process, int) or isinstance(process, bool) or not 0 <= process <= MAX_PROCESS:
            raise BadStreamError(f"the process is {process!r}, expected a number of at least 0")
        if not isinstance(self.epoch, str) or _EPOCH.fullmatch(self.epoch) is None:
            raise BadStreamError(f"the epoch is {str(self.epoch)[:80]!r}, expected 16 hexadecimal digits")

    def __str__(self) -> str:
        """The stream as messages to users name it."""
        return f"{self.run} p{self.process} ({self.epoch})"

    @property
    def folder(self) -> str:
        """Name of the stream's folder in a spool."""
        return f"{self.run}~{self.process}~{self.epoch}"

    @classmethod
    def of_folder(cls, name: str) -> StreamKey | None:
        """The key of a spool folder; None if the name is not a stream's."""
        found = _FOLDER.fullmatch(name)
        if found is None or not is_run(found[1]) or int(found[2]) > MAX_PROCESS:
            return None
        return cls(found[1], int(found[2]), found[3])

    def segment_name(self, number: int) -> str:
        """Name of one of its segments in a collector's folder of the run."""
        return f"p{self.process:06d}-{self.epoch}-{number:06d}.hcblog"


def stored_segment(run: str, name: str) -> tuple[StreamKey, int] | None:
    """The stream and the number of a segment in a collector's folder of a run; None if no collector names files so."""
    found = _SEGMENT.fullmatch(name)
    if found is None or int(found[1]) > MAX_PROCESS:
        return None
    return StreamKey(run, int(found[1]), found[2]), int(found[3])


class StreamOffset(NamedTuple):
    """A position in a stream.

    Attributes:
        segment: number of the segment; 0 before the first.
        offset: bytes from the start of the segment's file.
    """

    segment: int
    offset: int

    @classmethod
    def of(cls, found: Any) -> StreamOffset:
        """Decodes a position that came over the wire.

        Raises:
            BadStreamError: it is not a position.
        """
        if isinstance(found, list) and len(found) == 2 and all(type(number) is int for number in found):
            segment, offset = found
            if 0 <= segment <= MAX_SEGMENT and 0 <= offset <= MAX_OFFSET:
                return cls(segment, offset)
        raise BadStreamError(f"{str(found)[:80]} is not a position in a stream: expected two numbers")


START = StreamOffset(0, 0)


class SegmentSlice(NamedTuple):
    """Bytes of one segment.

    Attributes:
        position: of the first byte.
        data: at most `PIECE_BYTES`.
    """

    position: StreamOffset
    data: bytes

    @property
    def end(self) -> StreamOffset:
        """Position after the last byte."""
        return StreamOffset(self.position.segment, self.position.offset + len(self.data))
