"""Errors of tap logs, the records of skipped and lost messages, and the names of segments.

TapLogError          a log cannot be read or written
|-- NotATapLogError  a file or folder is not a tap log
|   `-- CutOffLogError   a file ends before a segment's header does
|-- NoSuchRunError   a log has no run of that name
`-- DamagedLogError  a log was read, except for its damaged parts
A log of a newer version raises `hostcallback.receiver.wire.UnsupportedVersionError`.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.text import printable


class TapLogError(HostCallbackError):
    """A tap log cannot be read or written."""


class NotATapLogError(TapLogError):
    """A file is not a segment of a tap log, or a folder has none."""


class CutOffLogError(NotATapLogError):
    """A file ends before a segment's header does: its writer was killed at that moment, or the file was truncated."""


class NoSuchRunError(TapLogError):
    """A log has no run of the wanted name."""


class DamagedLogError(TapLogError):
    """Parts of a log are damaged. The intact parts have been read."""


class ThinnedTap(NamedTuple):
    """A tap that rules thin out.

    Attributes:
        name: of the tap.
        rules: the rules in force, such as `every=10`; empty if there are none any more.
        suppressed: number of messages that rules suppressed: in a log's note, since the note before.
    """

    name: str
    rules: str
    suppressed: int


class Damage(NamedTuple):
    """A part of a segment that cannot be read. Reading continues after it.

    Attributes:
        path: of the segment.
        offset: start of the part in the file.
        nbytes: its length.
        messages: number of messages in it; -1 if unknown.
        reason: why it cannot be read.
        torn: whether it is the file's incomplete end: the writer was killed, or is still writing.
    """

    path: Path
    offset: int
    nbytes: int
    messages: int
    reason: str
    torn: bool = False

    def __str__(self) -> str:
        """Describes the damage in one line."""
        count = f" with {self.messages} message(s)" if self.messages >= 0 else ""
        return printable(
            f"{self.path}: {self.reason}: skipped {self.nbytes} bytes{count} at offset {self.offset}"
        )


class Lost(NamedTuple):
    """Messages of one device that a log notes as missing.

    Attributes:
        device: its name, such as `cpu:0`.
        first_seq: sequence number of the first one.
        last_seq: sequence number of the last one; messages with numbers between may be present.
        messages: number of missing messages.
        nbytes: their bytes; 0 if unknown.
        time_ns: Unix time in nanoseconds at which the note was written.
        reason: why they are missing.
    """

    device: str
    first_seq: int
    last_seq: int
    messages: int
    nbytes: int
    time_ns: int
    reason: str


SUFFIX = ".hcblog"


def segment_name(created_ns: int, number: int) -> str:
    """Name of this process's segment `number`, started at that time: `20261121T201500.123456-4711-000001.hcblog`."""
    # In UTC: a change of the local time must not give a newer segment an older name.
    seconds, rest = divmod(created_ns, 1_000_000_000)
    time = datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{time}.{rest // 1000:06d}-{os.getpid()}-{number:06d}{SUFFIX}"


def _logs_below(path: Path) -> str:
    # A folder of logs is what `hcb ui` takes.
    folders = sorted({entry.parent.name for entry in path.glob(f"*/*{SUFFIX}")})
    return (
        f"; its subfolders {', '.join(folders[:5])}{' and others' * (len(folders) > 5)} have one"
        if folders
        else ""
    )


def segments_of(path: str | os.PathLike[str]) -> list[Path]:
    """The segments of a path, oldest first: the file itself, or those in a folder.

    Raises:
        NotATapLogError: the folder has none.
        OSError: the path does not exist, or cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        path.stat()
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix == SUFFIX)
    if not found:
        raise NotATapLogError(
            f"{path}: this folder has no tap log, expected files *{SUFFIX}{_logs_below(path)}"
        )
    return found
