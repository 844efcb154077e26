"""Stores publications in a collector's tap logs: each message once, and a device's messages in order."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.nats.publication import Publication, gathered
from hostcallback.receiver.remote.streams import StreamKey, StreamOffset
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.errors import NotATapLogError
from hostcallback.receiver.taplog.format.layout import NO_STEP, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.merge import STREAM
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter

SEGMENT_BYTES = 64 << 20


class _Series:
    # Segments in which each device's messages are in order, as if one process had written them.

    def __init__(self, store: Store, key: StreamKey, writer: dict[str, Any]) -> None:
        self.key = StreamKey(key.run, key.process, uuid.uuid4().hex[:16])
        self.last: dict[str, int] = {}
        self.steps: dict[str, int] = {}  # the last one of each device
        self._folder = store.folder(key.run)
        self._permissions = store.permissions
        self._permissions.make_folder(self._folder)
        self._number = 0
        self._info = {**writer, "process": self.key.epoch, "run": key.run, STREAM: key.epoch}
        self.segment = self._next()

    def _next(self) -> SegmentWriter:
        self._number += 1
        path = self._folder / self.key.segment_name(self._number)
        return SegmentWriter(path, number=self._number, info=self._info, permissions=self._permissions)

    @property
    def position(self) -> StreamOffset:
        return StreamOffset(self._number, self.segment.nbytes)

    def rotate_if_due(self) -> None:
        if self.segment.nbytes >= SEGMENT_BYTES:
            self.segment.close()
            self.segment = self._next()


class NatsStore:
    """Writes publications into the logs of a collector's folder. One thread."""

    def __init__(self, store: Store) -> None:
        """Truncates the incomplete chunks that a killed collector left in the folder: JetStream delivers them again.

        Raises:
            OSError: a file cannot be truncated.
        """
        self._store = store
        for path in sorted(store.directory.glob("*/p*.hcblog")):
            _cut_off_torn(path)
        self._series: dict[StreamKey, _Series] = {}
        self._highest: dict[tuple[StreamKey, str], int] = {}

    def has(self, unit: Publication, *, again: bool) -> bool:
        """Whether a publication is stored. `again`: JetStream delivered it before, to this collector or another."""
        known = unit.key, unit.device
        if known not in self._highest:
            self._highest[known] = max((c.last_seq for _, c in self._chunks(unit, Kind.FRAMES)), default=-1)
        if unit.lost is not None:
            return again and any(_is_note(chunk, unit) for _, chunk in self._chunks(unit, Kind.LOST))
        first = int(unit.block.seqs[0])
        if first > self._highest[known]:
            return False
        for segment, chunk in self._chunks(unit, Kind.FRAMES):
            if chunk.first_seq <= first <= chunk.last_seq:
                # The range of a chunk may have gaps, since each publication has the messages of one tap only.
                block, _ = read_frames(segment, chunk)
                if (block.seqs == np.uint64(first)).any():
                    return True
        return False

    def append(self, units: Sequence[Publication]) -> tuple[StreamKey, StreamOffset]:
        """Stores publications of one device of one stream that are not stored yet; returns the log and its new end.

        Raises:
            OSError: they cannot be written.
        """
        first = units[0]
        key, device = first.key, first.device
        whole = [unit for unit in units if unit.lost is None]
        series = self._series.get(key)
        seqs = min((int(unit.block.seqs[0]) for unit in whole), default=-1)
        if series is None or (whole and seqs <= series.last.get(device, -1)):
            # Earlier messages came late, from a collector that died. A new series keeps each series in order.
            if series is not None:
                series.segment.close()
            series = self._series[key] = _Series(self._store, key, first.writer)
        if whole:
            self._append(series, device, whole)
        for unit in units:
            if unit.lost is not None:
                series.segment.lost(unit.lost)
        # Before the caller acknowledges: an acknowledged message exists nowhere else.
        if self._store.fsync:
            series.segment.sync()
        position = series.position
        series.rotate_if_due()
        return series.key, position

    def close(self) -> None:
        """Completes all segments."""
        for series in self._series.values():
            series.segment.close()
        self._series.clear()

    def _append(self, series: _Series, device: str, units: Sequence[Publication]) -> None:
        block = FrameBlock.join([unit.block for unit in units])
        steps = np.concatenate([unit.steps for unit in units])
        if len(units) > 1:
            order = np.argsort(block.seqs, kind="stable")
            block, steps = gathered(block, order), steps[order]
        described = {i: found for unit in units for i, found in unit.described.items()}
        folded = sorted(pair for unit in units for pair in unit.folded)
        last = int(block.seqs[-1])
        known = steps[steps != NO_STEP].tolist()
        # Without a step before them, readers take the messages for the first ones of the device.
        before = NO_STEP if not block.seqs[0] else series.steps.get(device, (known or [NO_STEP])[0])
        series.steps[device] = (known or [before])[-1]
        series.segment.frames(device, block, described, steps=steps, step_before=before, folded=folded)
        series.last[device] = last
        known = units[0].key, device
        self._highest[known] = max(self._highest.get(known, -1), last)

    def _chunks(self, unit: Publication, kind: Kind) -> Iterator[tuple[SegmentReader, Chunk]]:
        # Stored chunks of the publication's device.
        folder = self._store.folder(unit.key.run)
        for path in sorted(folder.glob(f"p{unit.key.process:06d}-*")) if folder.is_dir() else []:
            segment = _opened(path)
            if segment is None:
                continue
            if segment.info.get(STREAM) == unit.key.epoch:
                for chunk in segment.chunks():
                    if not isinstance(chunk, Chunk) or chunk.kind is not kind or chunk.is_torn:
                        continue
                    if kind is Kind.LOST or segment.devices.get(chunk.stream) == unit.device:
                        yield segment, chunk
            segment.close()


def _opened(path: Path | os.PathLike[str]) -> SegmentReader | None:
    try:
        return SegmentReader(path)
    except (NotATapLogError, OSError):
        return None


def _cut_off_torn(path: Path) -> None:
    # Readers would take the complete messages of a torn chunk, and then the same messages that come again.
    segment = _opened(path)
    if segment is None:
        return
    if STREAM in segment.info and not segment.is_closed():
        for item in segment.chunks():
            if item.is_torn if isinstance(item, Chunk) else item.torn:
                os.truncate(path, item.offset)
    segment.close()


def _is_note(chunk: Chunk, unit: Publication) -> bool:
    lost = unit.lost
    return lost is not None and (chunk.first_seq, chunk.last_seq, chunk.min_time_ns) == (
        lost.first_seq, lost.last_seq, lost.time_ns
    )  # fmt: skip
