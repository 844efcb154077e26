"""Tries to read and to show one chunk, in a process of limited memory and time.

A collector runs it for the chunk in whose delivery the collector before died. If it fails, the chunk is set aside.
"""

from __future__ import annotations

import enum
import os
import resource
import subprocess
import sys
from pathlib import Path

from hostcallback.receiver.messages.deferred_errors import OnError
from hostcallback.receiver.remote.delivery.stream_printer import StreamPrinter
from hostcallback.receiver.remote.spool.stream_reader import StoredRuns
from hostcallback.receiver.remote.streams import MAX_SEGMENT, StreamKey, StreamOffset
from hostcallback.receiver.replayer.run_delivery import RunDelivery
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.format.layout import Kind
from hostcallback.receiver.taplog.reading.merge import MessageRun
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.reading.selection import Selection

MEMORY_BYTES = 4 << 30
CPU_SEC = 60
WAIT_SEC = 120.0


class Findings(enum.Enum):
    """What became of the process.

    Attributes:
        HARMLESS: it has read and shown the chunk.
        POISON: it died of the chunk.
        UNREADABLE: it died of what stands before the chunk in its segment: descriptions of taps.
    """

    HARMLESS = enum.auto()
    POISON = enum.auto()
    UNREADABLE = enum.auto()


def examine(path: Path, key: StreamKey, position: StreamOffset) -> Findings:
    """Tries to read and to show the chunk at `position` of a stream, whose segment is at `path`."""
    if _survives("show", path, key, position):
        return Findings.HARMLESS
    return Findings.POISON if _survives("open", path, key, position) else Findings.UNREADABLE


def _survives(action: str, path: Path, key: StreamKey, position: StreamOffset) -> bool:
    command = [sys.executable, "-m", __name__, action, str(path), key.folder, *map(str, position)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=WAIT_SEC, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(action: str, path: Path, key: StreamKey, position: StreamOffset) -> None:
    """Reads one chunk, or only what stands before it; raises or dies if that is not possible."""
    # Both are limits of this process alone: what killed the collector must not be able to take the machine
    # with it.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SEC, CPU_SEC))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if action == "open":
        for item in SegmentReader(path).chunks():
            if (
                not isinstance(item, Damage)
                and item.kind is not Kind.DESCRIPTIONS
                and item.end > position.offset
            ):
                return
        return
    runs = StoredRuns(
        lambda number: path.with_name(key.segment_name(number)), position, lambda described: True
    )
    printer = StreamPrinter(key.process, runs.local_device, everything=True)
    scope = Scope("probe", 100, on_error=OnError.WARN)
    delivery = RunDelivery(scope, Selection(), sinks=[printer], printers=False)
    for record in runs.read(StreamOffset(MAX_SEGMENT, 0), 1):
        if isinstance(record, MessageRun):
            delivery.deliver(record)


if __name__ == "__main__":
    found = StreamKey.of_folder(sys.argv[3])
    assert found is not None
    main(sys.argv[1], Path(sys.argv[2]), found, StreamOffset(int(sys.argv[4]), int(sys.argv[5])))
