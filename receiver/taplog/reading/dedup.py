"""Reads messages once that are in several logs, as after a collector took over from one that died."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.reading.merge import LostRun, MessageRun, Record
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.wire.dtypes import Array

STREAM = "stream"
"""Field of a segment's header that names the stream of its messages, if that is not the writer's own."""

MAX_RANGES = 1 << 16


class SequenceRanges:
    """A set of numbers as ranges. Beyond the limit of ranges, the lowest are forgotten."""

    def __init__(self, max_ranges: int = MAX_RANGES) -> None:
        """The set is empty."""
        self._max_ranges = max_ranges
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, numbers: Array) -> Array:
        """Adds ascending numbers (int64 or uint64); returns for each whether it is new (bool)."""
        new = np.ones(len(numbers), np.bool_)
        ends = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(numbers)], strict=True):
            start, stop = int(numbers[first]), int(numbers[end - 1]) + 1
            # Merges the ranges that this one touches.
            low = bisect.bisect_left(self._stops, start)
            high = bisect.bisect_right(self._starts, stop)
            for known in range(low, high):
                begin, finish = max(start, self._starts[known]), min(stop, self._stops[known])
                new[first + begin - start : first + max(begin, finish) - start] = False
            if low < high:
                start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
            self._starts[low:high], self._stops[low:high] = [start], [stop]
        if len(self._starts) > self._max_ranges:  # copies have equal times, so they are read close together
            del self._starts[: self._max_ranges // 2], self._stops[: self._max_ranges // 2]
        return new


class SequenceDeduplicator:
    """Finds streams that are in several of the logs, and drops their repeated messages."""

    def __init__(self) -> None:
        """No log is known yet."""
        self._streams: dict[Writer, str] = {}
        self._writers: defaultdict[str, set[Writer]] = defaultdict(set)
        self._names: set[tuple[Writer, str]] = set()
        self._copied: set[str] = set()

    def note(self, writer: Writer, info: Mapping[str, Any], path: Path) -> None:
        """Registers a segment before it is read."""
        stream = str(info.get(STREAM) or writer.process)
        self._streams[writer] = stream
        self._writers[stream].add(writer)
        if len(self._writers[stream]) > 1 or (writer, path.name) in self._names:
            self._copied.add(stream)
        self._names.add((writer, path.name))

    def once(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records without repeated messages and notes."""
        seen: defaultdict[tuple[str, str], SequenceRanges] = defaultdict(SequenceRanges)
        notes: set[tuple[str, Any]] = set()
        for record in records:
            stream = self._streams.get(record.writer, "") if isinstance(record, MessageRun | LostRun) else ""
            if stream not in self._copied:
                yield record
            elif isinstance(record, LostRun):
                if (stream, record.lost) not in notes:
                    notes.add((stream, record.lost))
                    yield record
            elif isinstance(record, MessageRun):
                seqs = record.block.seqs[record.start : record.stop]
                new = seen[stream, record.device].add(seqs)
                if new.all():
                    yield record
                elif new.any():
                    block = record.block.part(record.start, record.stop).chosen(new)
                    steps = record.steps[record.start : record.stop][new]
                    yield record._replace(block=block, steps=steps, start=0, stop=len(block))
