"""The flight recorder: keeps a process's rings in files, from which the last messages of a killed process are read."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
import threading
import time
from pathlib import Path

from hostcallback.receiver import environment
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Consumer
from hostcallback.receiver.permissions import PRIVATE, write_private
from hostcallback.receiver.redaction import command_line
from hostcallback.receiver.run_name import own_run
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.source import Source
from hostcallback.receiver.taplog.flight.ring_file import SUFFIX
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter

PROCESS_FILE = "process.json"
TAPS_FILE = "taps.hcblog"

BLOCK_BYTES = 32 << 20
"""Room in a ring's file for payloads outside the ring; payloads that do not fit are not in the file."""


class FlightRecorder:
    """The flight recorder of this process. Any thread.

    Attributes:
        folder: of this process's files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates a folder for this process in `directory`, which only its user can open.

        Raises:
            OSError: it cannot be created or written to.
        """
        started_ns = time.time_ns()
        self.folder = Path(directory).absolute() / f"{platform.node()}-{os.getpid()}-{started_ns // 1000}"
        self._lock = threading.Lock()  # protects the writer of descriptors
        self._pid = os.getpid()
        self._failed = False
        PRIVATE.make_folder(self.folder.parent)
        self.folder.mkdir(mode=0o700)
        process = {
            "host": platform.node(),
            "pid": self._pid,
            "started_ns": started_ns,
            "run": own_run(),
            "command": command_line(sys.argv),
            "python": platform.python_version(),
        }
        write_private(self.folder / PROCESS_FILE, (json.dumps(process, indent=1) + "\n").encode())
        self._taps = SegmentWriter(self.folder / TAPS_FILE)

    def keep(self, name: str, source: Source) -> None:
        """Moves the ring of a device into a file. Does not raise: a failure is logged.

        Args:
            name: the device's.
            source: reads its ring; a device on the callback transport has no ring, and is not recorded.
        """
        if not isinstance(source, RingSource):
            logger.warning(
                "the flight recorder does not record %s: it needs the native transport, and has Python callbacks",
                name,
            )
            return
        path = self.folder / file_name(name)
        try:
            source.keep_in_file(path, name, BLOCK_BYTES)
        except OSError as error:
            if error.errno == errno.EEXIST:  # the ring is in a file already
                return
            logger.warning(
                "the flight recorder does not record %s: %s",
                name,
                _cure(error, source.capacity_bytes + BLOCK_BYTES),
            )

    def describe(self, consumer: Consumer) -> None:
        """Writes the descriptor of a consumer. Does not raise."""
        if consumer.describe is None:
            return
        try:
            described = consumer.describe()
            with self._lock:
                self._taps.describe(described)
        except ValueError as error:
            logger.debug("the flight recorder cannot describe %s: %s", consumer.name, error)
        except OSError as error:
            if not self._failed:
                logger.warning("the flight recorder cannot write %s: %s", self.folder / TAPS_FILE, error)
            self._failed = True

    def remove(self) -> None:
        """Removes the files when the process ends normally, after it has delivered everything."""
        # A forked child has a copy of this object, and the files are its parent's.
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._taps.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def file_name(name: str) -> str:
    """Name of the file of a device's ring."""
    return name.replace(":", "-").replace("/", "-") + SUFFIX


def _cure(error: OSError, nbytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"its file needs {nbytes >> 20} MiB, and the file system is full: make room, or name another folder"
    if error.errno == errno.EBUSY:
        variable = environment.FLIGHT_RECORDER
        return (
            f"the memory of a GPU's ring is pinned once the ring is used: set {variable} before the first tap"
        )
    return str(error)
