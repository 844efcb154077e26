"""The collector's side of `hcb tail --from`: what is stored of streams, from their last segments on, as it comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from receiver.remote.collector.store import Store
from receiver.remote.streams import PIECE_BYTES, SegmentSlice, StreamKey, StreamOffset

MAX_OLD = 64
"""So many streams that nobody sends at present are shown, those that grew last."""


class GrowthWatcher:
    """How far streams are stored, for those who follow. In the collector's event loop.

    Attributes:
        stored: how far, by stream.
        ended: whether nothing more will come: the collector ends.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.stored: dict[StreamKey, StreamOffset] = {}
        self.ended = False
        self._changed = asyncio.Event()

    def grown(self, key: StreamKey, position: StreamOffset) -> None:
        """More of a stream is stored."""
        self.stored[key] = position
        self._changed.set()

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Until more is stored."""
        self._changed.clear()
        await self._changed.wait()


class Following:
    """One who follows."""

    def __init__(self, store: Store, growth: GrowthWatcher, wants: Callable[[str], bool]) -> None:
        """Whoever it is wants, and may read, the runs of which `wants` is true."""
        self._store = store
        self._growth = growth
        self._wants = wants
        self._sent: dict[StreamKey, StreamOffset] = {}

    async def pieces(self) -> AsyncIterator[tuple[StreamKey, SegmentSlice] | None]:
        """The pieces of all streams, None once everything is there that was when it began, and then those that come."""
        stored = await asyncio.to_thread(self._latest)
        for key, position in stored.items():
            self._growth.stored.setdefault(key, position)
            self._sent[key] = StreamOffset(position.segment, 0)
            async for piece in self._send(key, position):
                yield key, piece
        yield None
        while True:
            behind = False
            for key, position in list(self._growth.stored.items()):
                if self._wants(key.run) and self._sent.get(key, StreamOffset(0, 0)) < position:
                    behind = True
                    async for piece in self._send(key, position):
                        yield key, piece
            if not behind and self._growth.ended:
                return
            if not behind:
                await self._growth.wait()

    def _latest(self) -> dict[StreamKey, StreamOffset]:
        stored = {key: at for key, at in self._store.stored().items() if self._wants(key.run)}

        def changed(key: StreamKey) -> float:
            return self._path(key, stored[key].segment).stat().st_mtime

        return {key: stored[key] for key in sorted(stored, key=changed)[-MAX_OLD:]}

    def _path(self, key: StreamKey, number: int) -> Path:
        return self._store.folder(key.run) / key.segment_name(number)

    async def _send(self, key: StreamKey, stored: StreamOffset) -> AsyncIterator[SegmentSlice]:
        at = self._sent.get(key) or StreamOffset(stored.segment, 0)
        while at < stored:
            data = await asyncio.to_thread(_read, self._path(key, at.segment), at.offset)
            if data:
                yield SegmentSlice(at, data)
                at = StreamOffset(at.segment, at.offset + len(data))
            elif at.segment < stored.segment:
                at = StreamOffset(at.segment + 1, 0)
            else:
                break
        self._sent[key] = at


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), PIECE_BYTES, offset)
    except FileNotFoundError:
        return b""
