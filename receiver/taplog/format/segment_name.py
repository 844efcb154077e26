"""Names of segments: they sort by time, and differ between processes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from hostcallback.receiver.taplog.format.errors import NotATapLogError

SUFFIX = ".hcblog"


def segment_name(created_ns: int, number: int) -> str:
    """Name of this process's segment `number`, started at that time: `20261121T201500.123456-4711-000001.hcblog`."""
    # In UTC: a change of the local time must not give a newer segment an older name.
    seconds, rest = divmod(created_ns, 1_000_000_000)
    time = datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{time}.{rest // 1000:06d}-{os.getpid()}-{number:06d}{SUFFIX}"


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
        raise NotATapLogError(f"{path}: this folder has no tap log, expected files *{SUFFIX}")
    return found
