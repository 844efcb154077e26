"""The file in which a collector keeps how far it has delivered each stream to its consumers.

The file is a msgpack list with an entry per stream: the stream, and the position up to which all messages were
delivered. If shards of incomplete values are excepted, the position before the first of them and their sequence
numbers by device follow, otherwise two nils. The last item is the number of messages after the position that were
delivered, too: a turn may end within a chunk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from hostcallback.receiver.permissions import write_private
from hostcallback.receiver.remote.errors import BadStreamError
from hostcallback.receiver.remote.spool.stream_reader import Again
from hostcallback.receiver.remote.streams import StreamKey, StreamOffset

NAME = ".delivered"


class Waiting(NamedTuple):
    """The location of a shard that waits for other shards of its value.

    Attributes:
        position: where reading must start to find it.
        device: name of its device.
        seq: its sequence number on that device.
    """

    position: StreamOffset
    device: str
    seq: int


class Cursor:
    """How far each stream was delivered, in a file. One thread."""

    def __init__(self, directory: Path) -> None:
        """Reads the file. A missing or invalid one counts as empty: then everything is delivered again."""
        self._path = directory / NAME
        self._positions: dict[StreamKey, StreamOffset] = {}
        self._waiting: dict[StreamKey, Again] = {}
        self._done: dict[StreamKey, int] = {}
        self._is_saved = True
        # A file that a crash left invalid costs repeated deliveries. Raising would keep the collector from starting.
        invalid = (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            msgpack.UnpackException,
            BadStreamError,
        )
        with contextlib.suppress(OSError, *invalid):
            for folder, position, *rest in msgpack.unpackb(self._path.read_bytes()):
                key = StreamKey.of_folder(folder)
                if key is not None:
                    self._positions[key] = StreamOffset.of(position)
                    since, seqs, done = [*rest, None, None, 0][:3] if len(rest) != 2 else (*rest, 0)
                    if since is not None:
                        self._waiting[key] = Again(StreamOffset.of(since), _seqs(seqs))
                    self._done[key] = _number(done)

    def position(self, key: StreamKey) -> StreamOffset:
        """Position from which to continue a stream."""
        return self._positions.get(key, StreamOffset(0, 0))

    def done(self, key: StreamKey) -> int:
        """Number of messages after that position that were delivered."""
        return self._done.get(key, 0)

    def waiting(self, key: StreamKey) -> Again | None:
        """Shards before that position whose values are incomplete; None if there are none."""
        return self._waiting.get(key)

    def wait_for(self, shards: Iterable[tuple[StreamKey, Waiting]]) -> None:
        """Sets the shards whose values are incomplete. All other messages before the positions were delivered."""
        since: dict[StreamKey, StreamOffset] = {}
        seqs: dict[StreamKey, dict[str, list[int]]] = {}
        for key, (position, device, seq) in shards:
            since[key] = min(position, since.get(key, position))
            seqs.setdefault(key, {}).setdefault(device, []).append(seq)
        waiting = {key: Again(since[key], seqs[key]) for key in since}
        if waiting != self._waiting:
            self._waiting = waiting
            self._is_saved = False

    def move(self, key: StreamKey, position: StreamOffset, done: int = 0) -> None:
        """Notes that all messages of a stream before `position`, and `done` after it, have been delivered."""
        if self._positions.get(key) != position or self.done(key) != done:
            self._positions[key], self._done[key] = position, done
            self._is_saved = False

    def pass_over(self, key: StreamKey, position: StreamOffset) -> None:
        """Notes that nothing of a stream before `position` will be delivered any more."""
        self._waiting.pop(key, None)
        self._is_saved = False
        if position > self.position(key):
            self.move(key, position)

    def save(self) -> None:
        """Writes the file if anything has changed.

        Raises:
            OSError: it cannot be written; the old file stays.
        """
        if self._is_saved:
            return
        data: bytes = msgpack.packb([self._entry(key) for key in self._positions])
        new = self._path.with_suffix(".new")
        write_private(new, data)
        os.replace(new, self._path)
        self._is_saved = True

    def _entry(self, key: StreamKey) -> tuple[Any, ...]:
        waiting = self._waiting.get(key)
        since, seqs = (None, None) if waiting is None else (waiting.since, waiting.seqs)
        return key.folder, self._positions[key], since, seqs, self.done(key)


def _seqs(found: dict[str, list[int]]) -> dict[str, list[int]]:
    return {str(device): list(map(_number, seqs)) for device, seqs in found.items()}


def _number(found: object) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"{found!r} is not a number of a message")
    return found
