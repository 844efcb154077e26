"""Writes a log with a message of each of many taps, without JAX: `python many_taps.py FOLDER TAPS`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from logged_frames import LOSS, block_of, frame

BLOCK = 2_000
"""Messages that are appended at a time."""


def write_many(folder: Path, taps: int, *, segment_bytes: int = 16 << 20) -> Path:
    """Writes a number of each tap, `layer_0` and so on; returns the folder."""
    log = LogWriter(folder, LogOptions(segment_bytes=segment_bytes))
    for first in range(0, taps, BLOCK):
        made = [
            replace(LOSS, name=f"layer_{number}", consumer_id=1000 + number)
            for number in range(first, min(taps, first + BLOCK))
        ]
        for described in made:
            log.describe(described)
        frames = [
            frame(described, np.float32(number), np.int32(0), seq=number)
            for number, described in enumerate(made, first)
        ]
        log.append("cpu:0", block_of(*frames), at_once=True)
    log.close()
    return folder


if __name__ == "__main__":
    write_many(Path(sys.argv[1]), int(sys.argv[2]))
