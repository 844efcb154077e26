"""How far a collector has delivered each stream to its consumers, in a file.

It is the msgpack of a list with an entry for each stream: the stream, the position before which all was delivered but
for some shards of values that were incomplete, the position before the first of these, and their numbers by device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from receiver.remote.errors import BadStreamError
from receiver.remote.spool.stream_reader import Again
from receiver.remote.streams import StreamKey, StreamOffset

NAME = ".delivered"


class Waiting(NamedTuple):
    """Where a shard is.

    Attributes:
        position: where to go on to read it.
        device: its device's name.
        seq: its number there.
    """

    position: StreamOffset
    device: str
    seq: int


class Cursor:
    """The file. One thread."""

    def __init__(self, directory: Path) -> None:
        """Reads it, if there is one that is good."""
        self._path = directory / NAME
        self._positions: dict[StreamKey, StreamOffset] = {}
        self._waiting: dict[StreamKey, Again] = {}
        self._is_saved = True
        with contextlib.suppress(OSError, ValueError, TypeError, msgpack.UnpackException, BadStreamError):
            for folder, position, *waiting in msgpack.unpackb(self._path.read_bytes()):
                key = StreamKey.of_folder(folder)
                if key is not None:
                    self._positions[key] = StreamOffset.of(position)
                    if waiting:
                        since, seqs = waiting
                        self._waiting[key] = Again(StreamOffset.of(since), dict(seqs))

    def position(self, key: StreamKey) -> StreamOffset:
        """Where to go on with a stream."""
        return self._positions.get(key, StreamOffset(0, 0))

    def waiting(self, key: StreamKey) -> Again | None:
        """The shards before that position whose values were incomplete, if there are such."""
        return self._waiting.get(key)

    def wait_for(self, shards: Iterable[tuple[StreamKey, Waiting]]) -> None:
        """Of all that was delivered, only these shards belong to values that are incomplete."""
        since: dict[StreamKey, StreamOffset] = {}
        seqs: dict[StreamKey, dict[str, list[int]]] = {}
        for key, (position, device, seq) in shards:
            since[key] = min(position, since.get(key, position))
            seqs.setdefault(key, {}).setdefault(device, []).append(seq)
        waiting = {key: Again(since[key], seqs[key]) for key in since}
        if waiting != self._waiting:
            self._waiting = waiting
            self._is_saved = False

    def move(self, key: StreamKey, position: StreamOffset) -> None:
        """Everything before it has been delivered."""
        if self._positions.get(key) != position:
            self._positions[key] = position
            self._is_saved = False

    def save(self) -> None:
        """Writes the file, if anything has changed.

        Raises:
            OSError: it cannot be written; the old one stays.
        """
        if self._is_saved:
            return
        data: bytes = msgpack.packb([self._entry(key) for key in self._positions])
        new = self._path.with_suffix(".new")
        new.write_bytes(data)
        os.replace(new, self._path)
        self._is_saved = True

    def _entry(self, key: StreamKey) -> tuple[Any, ...]:
        waiting = self._waiting.get(key)
        entry = key.folder, self._positions[key]
        return entry if waiting is None else (*entry, waiting.since, waiting.seqs)
