"""Keeps a process's rings in files, so that whoever finds it dead can read its last messages there."""

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

from receiver import environment
from receiver.log import logger
from receiver.messages.message import Consumer
from receiver.sources.ring import RingSource
from receiver.sources.source import Source
from receiver.taplog.flight.ring_file import SUFFIX
from receiver.taplog.writing.segment_writer import SegmentWriter

PROCESS_FILE = "process.json"
TAPS_FILE = "taps.hcblog"

BLOCK_BYTES = 32 << 20
"""Room in a ring's file for payloads that travel outside the ring; larger ones and those beyond it are not kept."""


class FlightRecorder:
    """The flight recorder of this process. Any thread.

    Attributes:
        folder: where this process's files are.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Makes a folder of this process's own in `directory`, for the owner's eyes only.

        Raises:
            OSError: it cannot be made or written to.
        """
        started_ns = time.time_ns()
        self.folder = Path(directory).absolute() / f"{platform.node()}-{os.getpid()}-{started_ns // 1000}"
        self._lock = threading.Lock()  # protects the writer
        self._pid = os.getpid()
        self._failed = False
        self.folder.mkdir(mode=0o700, parents=True)
        process = {
            "host": platform.node(),
            "pid": self._pid,
            "started_ns": started_ns,
            "command": sys.argv,
            "python": platform.python_version(),
        }
        (self.folder / PROCESS_FILE).write_text(json.dumps(process, indent=1) + "\n", encoding="utf-8")
        self._taps = SegmentWriter(self.folder / TAPS_FILE)

    def keep(self, name: str, source: Source) -> None:
        """Moves the ring of a device into a file of its own. Does not raise: what cannot be kept is logged.

        Args:
            name: the device's.
            source: reads its ring; of devices without one, on the callback transport, nothing is kept.
        """
        if not isinstance(source, RingSource):
            logger.warning(
                "the flight recorder keeps nothing of %s: it needs the native transport, and has Python callbacks",
                name,
            )
            return
        path = self.folder / file_name(name)
        try:
            source.keep_in_file(path, name, BLOCK_BYTES)
        except OSError as error:
            if error.errno == errno.EEXIST:  # another file has it already
                return
            logger.warning(
                "the flight recorder does not keep %s: %s",
                name,
                _cure(error, source.capacity_bytes + BLOCK_BYTES),
            )

    def describe(self, consumer: Consumer) -> None:
        """Notes what a consumer is. Does not raise."""
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
        """Removes the files: the process ends as it should, and has delivered everything."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._taps.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def file_name(name: str) -> str:
    """Of the file of a device's ring."""
    return name.replace(":", "-").replace("/", "-") + SUFFIX


def _cure(error: OSError, nbytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"its file needs {nbytes >> 20} MiB, and the file system is full: make room, or name another folder"
    if error.errno == errno.EBUSY:
        variable = environment.FLIGHT_RECORDER
        return f"the memory of a GPU's ring is pinned once it is in use: set {variable} before the first tap"
    return str(error)
