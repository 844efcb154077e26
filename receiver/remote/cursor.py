"""How far a collector has delivered each stream to its consumers, in a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgpack

from receiver.remote.errors import BadStreamError
from receiver.remote.stream import Position, StreamKey

NAME = ".delivered"


class Cursor:
    """The file. One thread."""

    def __init__(self, directory: Path) -> None:
        """Reads it, if there is one that is good."""
        self._path = directory / NAME
        self._positions: dict[StreamKey, Position] = {}
        self._is_saved = True
        with contextlib.suppress(OSError, ValueError, TypeError, msgpack.UnpackException, BadStreamError):
            for folder, position in msgpack.unpackb(self._path.read_bytes()):
                key = StreamKey.of_folder(folder)
                if key is not None:
                    self._positions[key] = Position.of(position)

    def position(self, key: StreamKey) -> Position:
        """Where to go on with a stream."""
        return self._positions.get(key, Position(0, 0))

    def move(self, key: StreamKey, position: Position) -> None:
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
        data: bytes = msgpack.packb([(key.folder, position) for key, position in self._positions.items()])
        new = self._path.with_suffix(".new")
        new.write_bytes(data)
        os.replace(new, self._path)
        self._is_saved = True
