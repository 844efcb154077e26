"""Tries to read and to show one chunk, in a process of limited memory and time.

A collector runs it for the chunk in whose delivery the collector before died. If it fails, the chunk is set aside.
"""

from __future__ import annotations

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
from hostcallback.receiver.taplog.reading.merge import MessageRun
from hostcallback.receiver.taplog.reading.selection import Selection

MEMORY_BYTES = 4 << 30
CPU_SEC = 60
WAIT_SEC = 120.0


def is_harmless(folder: Path, key: StreamKey, position: StreamOffset) -> bool:
    """Whether a process can read and show the chunk at `position`."""
    command = [sys.executable, "-m", __name__, str(folder), key.folder, *map(str, position)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=WAIT_SEC, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(folder: Path, key: StreamKey, position: StreamOffset) -> None:
    """Reads and shows one chunk; raises or dies if that is not possible."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SEC, CPU_SEC))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    runs = StoredRuns(lambda number: folder / key.segment_name(number), position, lambda described: True)
    printer = StreamPrinter(key.process, runs.local_device, everything=True)
    scope = Scope("probe", 100, on_error=OnError.WARN)
    delivery = RunDelivery(scope, Selection(), sinks=[printer], printers=False)
    for record in runs.read(StreamOffset(MAX_SEGMENT, 0), 1):
        if isinstance(record, MessageRun):
            delivery.deliver(record)


if __name__ == "__main__":
    found = StreamKey.of_folder(sys.argv[2])
    assert found is not None
    main(Path(sys.argv[1]), found, StreamOffset(int(sys.argv[3]), int(sys.argv[4])))
