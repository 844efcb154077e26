"""Counts what a process left in its log, its flight recorder, its spool and at the collector, and finds the faults."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import CutOffLogError
from hostcallback.receiver.taplog.flight.recovery import NoFlightError, find_flights
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Damage, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import read_frames
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.wire.frame import HEADER

PAYLOAD_BYTES = 64
"""Length of a frame's payload, the message's number, with its padding: the end of the frame."""


NONE = np.empty(0, np.int64)


class Held(NamedTuple):
    """The messages of one process in one place.

    Attributes:
        numbers: their values, in the place's order: a process emits 0, 1, 2, ...
        times: their emission times in Unix nanoseconds.
        noted: messages that the place says it has lost.
    """

    numbers: np.ndarray[Any, Any]
    times: np.ndarray[Any, Any]
    noted: int = 0

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.numbers)

    @property
    def end(self) -> int:
        """The number after the last one."""
        return int(self.numbers[-1]) + 1 if self.count else 0

    def faults(self, place: str) -> list[str]:
        """What is wrong with a place that must have all messages from the first on, once and in order."""
        found = [f"{place}: {self.noted} messages are noted as lost"] if self.noted else []
        wrong = np.flatnonzero(self.numbers != np.arange(self.count))
        if wrong.size:
            at = int(wrong[0])
            found.append(f"{place}: message {int(self.numbers[at])} at place {at} of {self.count}")
        return found


def in_segments(paths: Iterable[Path]) -> tuple[Held, list[str]]:
    """The messages in segments of a log, and what is wrong with these. The last one may be cut off."""
    numbers, times, noted = [NONE], [NONE], 0
    faults: list[str] = []
    for path in sorted(paths, key=lambda path: path.name):
        try:
            segment = SegmentReader(path)
        except (CutOffLogError, FileNotFoundError):  # it was begun, or sent and removed, at this moment
            continue
        for item in segment.chunks():
            if isinstance(item, Damage):
                faults += [] if item.torn else [str(item)]
            elif item.kind is Kind.FRAMES:
                block, damage = read_frames(segment, item)
                faults += [str(damage)] if damage is not None and not damage.torn else []
                if len(block):
                    numbers.append(_numbers(block))
                    times.append(np.asarray(block.times_ns, np.int64))
            elif item.kind is Kind.LOST:
                lost = segment.lost_in(item)
                noted += 0 if isinstance(lost, Damage) else lost.messages
        segment.close()
    return Held(np.concatenate(numbers), np.concatenate(times), noted), faults


def _numbers(block: FrameBlock) -> np.ndarray[Any, Any]:
    sizes = HEADER.size + (block.meta_bytes + np.uint64(63)) // np.uint64(64) * np.uint64(64)
    starts = block.offsets + sizes.astype(np.int64)
    found: np.ndarray[Any, Any] = block.data.view("<i4")[starts // 4]
    return found.astype(np.int64)


def in_flight(folder: Path) -> tuple[Held, list[str]]:
    """The messages that a flight recorder kept, and what is wrong with it."""
    numbers: list[int] = []
    times: list[int] = []
    faults: list[str] = []
    try:
        flights = find_flights(folder)
    except (NoFlightError, FileNotFoundError):
        return Held(NONE, NONE), []
    for flight in flights:
        faults += flight.problems
        for ring in flight.rings:
            for frame in ring.frames:
                numbers.append(int.from_bytes(frame.frame[-PAYLOAD_BYTES:][:4], "little", signed=True))
                times.append(frame.header.time_ns)
    held = Held(np.asarray(numbers, np.int64), np.asarray(times, np.int64))
    if held.count and (np.diff(held.numbers) != 1).any():
        faults.append(f"flight: the numbers from {held.numbers[0]} to {held.numbers[-1]} have gaps")
    return held, faults


def late_ms(held: Held, all_times: Held) -> float:
    """Age at the end of the first message that a place does not have; 0 if it has all.

    `all_times` are the last messages of the process. If the first missing one is not among them, the last one that the
    place has stands for it.
    """
    if held.end >= all_times.end:
        return 0.0
    at = held.end - int(all_times.numbers[0])
    last_known = held.times[-1] if held.count else all_times.times[0]
    first_missing = all_times.times[at] if at >= 0 else last_known
    return (int(all_times.times[-1]) - int(first_missing)) / 1e6


def joined(sent: Held, spooled: Held) -> Held:
    """What the collector or the spool has. The spool keeps what is not acknowledged, so the two may overlap."""
    kept = spooled.numbers >= sent.end
    numbers = np.concatenate([sent.numbers, spooled.numbers[kept]])
    return Held(numbers, np.concatenate([sent.times, spooled.times[kept]]), sent.noted + spooled.noted)


def is_of(path: Path, pid: int) -> bool:
    """Whether a process wrote a segment."""
    try:
        segment = SegmentReader(path)
    except (CutOffLogError, FileNotFoundError):
        return False
    segment.close()
    return segment.writer.pid == pid
