"""The collector's side of `hcb tail --from`: sends streams from their last stored segments on, as they grow."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import (
    PIECE_BYTES,
    START,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)
from hostcallback.receiver.remote.spool.stream_reader import next_segment

MAX_OLD = 64
"""Number of streams without a connected client that are sent: those that grew last."""


class GrowthWatcher:
    """Tells following clients how far streams are stored. Runs in the collector's event loop.

    Attributes:
        stored: end of the stored bytes, by stream.
        ended: whether the collector ends, so that no stream will grow any more.
    """

    def __init__(self) -> None:
        """No stream has grown yet."""
        self.stored: dict[StreamKey, StreamOffset] = {}
        self.ended = False
        self._changed = asyncio.Event()

    def grown(self, key: StreamKey, position: StreamOffset) -> None:
        """Announces that a stream is stored up to `position`."""
        self.stored[key] = position
        self._changed.set()

    def end(self) -> None:
        """Announces that no stream will grow any more."""
        self.ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Waits until a stream grows or the collector ends."""
        self._changed.clear()
        await self._changed.wait()


class Following:
    """One client that follows streams."""

    def __init__(self, store: Store, growth: GrowthWatcher, wants: Callable[[str], bool]) -> None:
        """`wants` tells which runs the client has asked for and may read."""
        self._store = store
        self._growth = growth
        self._wants = wants
        self._sent: dict[StreamKey, StreamOffset] = {}
        self._old: dict[StreamKey, StreamOffset] = {}

    async def pieces(self) -> AsyncIterator[tuple[StreamKey, SegmentSlice] | None]:
        """Yields the slices of the streams that are stored at the start, then None, then those stored later.

        A stream that is stored at the start is sent from its last segment on, one that begins later from its first.
        """
        self._old = await asyncio.to_thread(self._store.stored)
        for key, position in (await asyncio.to_thread(self._latest)).items():
            self._growth.stored.setdefault(key, position)
            self._sent[key] = StreamOffset(position.segment, 0)
            async for piece in self._send(key, position):
                yield key, piece
        yield None
        while True:
            behind = False
            for key, position in list(self._growth.stored.items()):
                if self._wants(key.run) and self._sent.get(key, START) < position:
                    behind = True
                    async for piece in self._send(key, position):
                        yield key, piece
            if not behind and self._growth.ended:
                return
            if not behind:
                await self._growth.wait()

    def _latest(self) -> dict[StreamKey, StreamOffset]:
        stored = {key: at for key, at in self._old.items() if self._wants(key.run)}

        def changed(key: StreamKey) -> float:
            return self._path(key, stored[key].segment).stat().st_mtime

        return {key: stored[key] for key in sorted(stored, key=changed)[-MAX_OLD:]}

    def _path(self, key: StreamKey, number: int) -> Path:
        return self._store.folder(key.run) / key.segment_name(number)

    async def _send(self, key: StreamKey, stored: StreamOffset) -> AsyncIterator[SegmentSlice]:
        at = self._sent.get(key) or (StreamOffset(stored.segment, 0) if key in self._old else START)
        while at < stored:
            data = await asyncio.to_thread(_read, self._path(key, at.segment), at.offset)
            if data:
                yield SegmentSlice(at, data)
                at = StreamOffset(at.segment, at.offset + len(data))
            elif at.segment < stored.segment:
                path_of = functools.partial(self._path, key)
                number = await asyncio.to_thread(next_segment, path_of, at.segment, stored.segment)
                at = StreamOffset(number, 0)
            else:  # the file was removed or cut since: what it had cannot be sent any more
                at = stored
        self._sent[key] = at


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), PIECE_BYTES, offset)
    except FileNotFoundError:
        return b""
