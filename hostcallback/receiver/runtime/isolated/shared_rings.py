"""Shared-memory rings that the reader process drains, and the routing of taps to them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.processes import is_alive
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.taplog.flight.recorder import BLOCK_BYTES, FlightRecorder, file_name

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "hostcallback-rings-"


class SharedRings:
    """The shared rings of one process. They are never unmapped while it lives. Any thread.

    Attributes:
        folder: folder of their files.
    """

    def __init__(self, registry: Registry) -> None:
        """Makes a folder in shared memory, or in the folder for temporary files if shared memory cannot be written.

        Raises:
            OSError: the folder cannot be made.
        """
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_left_behind(base)
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
        self._recorder = FlightRecorder(self._directory)
        self.folder = self._recorder.folder
        self._registry = registry
        self._rings: dict[str, RingSource] = {}
        registry.watch(self._recorder.describe)

    def ring(self, name: str, source: RingSource) -> RingSource:
        """Returns the shared ring of a device, and makes it and its file if it does not exist.

        Raises:
            OSError: it cannot be put into a file.
            MemoryError: the system has no memory for it.
        """
        ring = self._rings.get(name)
        if ring is None:
            ring = RingSource.open_shared(source, BLOCK_BYTES // 2)
            ring.keep_in_file(self.file(name), name, BLOCK_BYTES)
            self._rings[name] = ring
        return ring

    def file(self, name: str) -> Path:
        """Returns the file of a device's ring."""
        return self.folder / file_name(name)

    def remove(self) -> None:
        """Removes the files, when no process reads them any more."""
        self._recorder.remove()
        shutil.rmtree(self._directory, ignore_errors=True)


def _remove_left_behind(base: Path) -> None:
    # Folders stay behind if a process is killed together with its reader process.
    for folder in base.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        try:
            # Only this user's: in a folder that all users share, another user's folder could be anything.
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


class SharedRingRouting:
    """Routes taps to the shared rings. Any thread."""

    def __init__(self, registry: Registry, wanted: Callable[[Consumer], bool]) -> None:
        """Routes the taps for which `wanted` returns True, registered now or later."""
        self._library = native.load()
        self._registry = registry
        self._wanted = wanted
        self._routed: set[int] = set()
        registry.watch(self._route)

    def end(self) -> None:
        """Routes all taps back to the rings that this process reads."""
        self._registry.unwatch(self._route)
        for consumer_id in list(self._routed):
            self._library.hcb_control_outside(consumer_id, 0)

    def _route(self, consumer: Consumer) -> None:
        if not self._wanted(consumer):
            return
        if self._library.hcb_control_outside(consumer.consumer_id, 1):
            logger.warning("%s is delivered in this process: the table of controls is full", consumer.name)
        else:
            self._routed.add(consumer.consumer_id)
