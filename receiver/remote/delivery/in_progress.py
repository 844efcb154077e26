"""The chunk that a collector delivers now, in a file: who reads it after a crash knows what the collector died of."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import msgpack

from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.errors import BadStreamError
from hostcallback.receiver.remote.streams import StreamKey, StreamOffset
from hostcallback.receiver.wire.plain import unpack_plain

NAME = ".delivering"
FILE_BYTES = 512


class Interrupted(NamedTuple):
    """A chunk in whose delivery a collector died.

    Attributes:
        key: its stream.
        position: of the chunk.
        deaths: how often.
    """

    key: StreamKey
    position: StreamOffset
    deaths: int


class InProgress:
    """Notes the chunk that is being delivered. One thread. A write into the mapped file outlives the process."""

    def __init__(self, directory: Path) -> None:
        """Reads what the collector before left, and maps the file. Without the file, nothing is noted."""
        self.interrupted: Interrupted | None = None
        self._map: mmap.mmap | None = None
        self._now: tuple[StreamKey, StreamOffset] | None = None
        try:
            descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, FILE_BYTES)
                self._map = mmap.mmap(descriptor, FILE_BYTES)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be written: %s", directory / NAME, error)
            return
        # The collector may have been killed while it wrote the record. No message is suspected then.
        with contextlib.suppress(ValueError, TypeError, BadStreamError):
            folder, position, deaths = unpack_plain(
                self._map[2 : 2 + int.from_bytes(self._map[:2], "little")]
            )
            key = StreamKey.of_folder(folder)
            if key is not None and type(deaths) is int and deaths >= 0:
                self.interrupted = Interrupted(key, StreamOffset.of(position), deaths + 1)
        self._clear()

    def enter(self, key: StreamKey, position: StreamOffset) -> None:
        """Notes that the chunk at `position` is delivered now."""
        now = key, position
        if self._map is None or self._now == now:
            return
        self._now = now
        before = self.interrupted
        deaths = before.deaths if before is not None and before[:2] == now else 0
        data: bytes = msgpack.packb((key.folder, position, deaths))
        # The length comes last: a process that is killed in between leaves a length of 0, or a record that cannot
        # be decoded, and no message is suspected.
        self._map[2 : 2 + len(data)] = data
        self._map[:2] = len(data).to_bytes(2, "little")

    def leave(self) -> None:
        """Notes that no chunk is being delivered."""
        if self._now is not None:
            self._clear()

    def _clear(self) -> None:
        self._now = None
        if self._map is not None:
            self._map[:2] = bytes(2)
