"""The index of the messages of logs: filled chunk by chunk by one thread, asked by others."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hostcallback.receiver.processes import is_alive
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.times import Times
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, NO_STEP, Damage, Kind
from hostcallback.receiver.taplog.format.step_finder import (
    AHEAD_BYTES,
    AHEAD_CHUNKS,
    AHEAD_MESSAGES,
    BEGINNING,
    UNKNOWN,
    Columns,
    StepFinder,
)
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.ui.index import buckets
from hostcallback.receiver.ui.index.block_reader import BlockReader, ScalarPart, Taker
from hostcallback.receiver.ui.index.buckets import ChunkTable
from hostcallback.receiver.ui.index.devices import DeviceTable
from hostcallback.receiver.ui.index.failures import Failures
from hostcallback.receiver.ui.index.log_files import FairLock, LogFiles, Segment
from hostcallback.receiver.ui.index.taps import MAX_TAPS, Tap, TapTable
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

MAX_HEADERS = 16_384
"""Number of chunk headers that are kept until the chunks are read; others are read again."""

MAX_DESCRIBED = MAX_TAPS
"""Number of taps whose descriptors are kept; messages of other taps are only counted."""

CHUNKS_AROUND = 64
"""Headers of chunks that are looked at for the next or previous chunk of a device."""

FEW = 20
"""A scalar is drawn by step, without the messages that have none, if these are at most one in `FEW`."""

SINGLE_MESSAGES = 200_000
"""The first messages of a run have a bucket each, so that short runs are shown message by message."""

ALIVE_SEC = 1.0
"""Seconds for which the answer "is this process alive" is kept."""

QUIET_SEC = 30.0
"""Seconds without growth after which another machine's unfinished segment counts as ended."""

_T = TypeVar("_T")


class Origin(NamedTuple):
    """The messages of a chunk, read from the log.

    Attributes:
        number: of the chunk.
        run_name: name of the run.
        run: its messages.
    """

    number: int
    run_name: str
    run: Stretch

    def places(self, wants: Callable[[TapDescriptor], bool]) -> tuple[Array, bool]:
        """Places of the messages of wanted taps, and whether only decoding can tell which of them these are."""
        block = self.run.block
        unknown = {WHOLE_ID, SHARDS_ID} & {*block.consumers}
        ids = [
            consumer_id
            for consumer_id in block.consumers
            if consumer_id in unknown
            or ((described := self.run.described.get(consumer_id)) is not None and wants(described))
        ]
        return np.flatnonzero(np.isin(block.consumer_ids, np.array(ids, np.uint64))), bool(unknown)


class _WriterState(NamedTuple):
    # What is known of a process: its taps, its steps, and failures that were left out, by device.
    described: dict[int, TapDescriptor]
    steps: StepFinder
    folded: dict[str, dict[int, int]]


class LogIndex:
    """The index. One thread calls `look` and `read_some`; any thread asks, under `lock`.

    Attributes:
        lock: protects all that is below.
        files: the segments.
        taps: the rows of taps.
        chunks: the chunks of messages.
        failures: failed checks, losses and damage.
        devices: counts by process and device.
        messages: messages that were read, by run.
        texts: messages with texts that were read.
        distributions: the times of places, by run, name and source line of the tap that measured them.
        version: grows with each change.
        is_looking: whether not all segments have been looked at so far.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """Reads nothing yet.

        Raises:
            OSError: a path does not exist.
        """
        self.lock = FairLock()
        self.files = LogFiles(paths, self._unpack)
        self.taps = TapTable()
        self.is_looking = False
        self.chunks = ChunkTable()
        self.failures = Failures()
        self.devices = DeviceTable()
        self.messages: dict[str, int] = {}
        self.texts = 0
        self.distributions: dict[tuple[str, str, str], Times] = {}
        self.version = 0
        self._pending: deque[tuple[int, Chunk | None]] = deque()
        self._looked_ahead: dict[tuple[int, int], Columns] = {}
        self._writers: dict[Writer, _WriterState] = {}
        self._reader = BlockReader(self.taps)
        self._current = 0
        self._numbers: dict[int, dict[int, int]] = {}
        self._descriptors: dict[bytes, TapDescriptor] = {}
        self._look_at = 0
        self._alive: dict[int, bool] = {}
        self._alive_at = 0.0

    @property
    def pending(self) -> int:
        """Chunks that were found and not read yet."""
        return len(self._pending)

    def look(self, budget_sec: float = math.inf) -> None:
        """Looks for new segments and chunks, for about that long; the next call goes on (`is_looking`)."""
        ends = time.monotonic() + budget_sec
        new: list[tuple[int, Chunk | None]] = []
        if not self.is_looking:
            with self.lock:
                self.files.find()
            self._look_at, self.is_looking = 0, True
        while self._look_at < len(self.files.segments) and time.monotonic() < ends:
            segment = self.files.segments[self._look_at]
            self._look_at += 1
            if segment.reader is not None:
                with self.lock:
                    self._look_into(segment, new)
                self.lock.let_others()
        with self.lock:
            self.is_looking = self._look_at < len(self.files.segments)
            self._pending.extend(_coarse_first(new))

    def _look_into(self, segment: Segment, new: list[tuple[int, Chunk | None]]) -> None:
        for chunk in self.files.new_chunks(segment):
            if chunk.kind is Kind.FRAMES:
                number = self.chunks.add(segment.number, chunk)
                new.append((number, chunk if len(new) < MAX_HEADERS else None))
            elif chunk.kind in (Kind.LOST, Kind.FOLDED, Kind.EXCEPTIONS):
                self._note(segment, chunk)
        self.files.close_complete(segment)
        if segment.consumers:
            self._take_consumers(segment)

    def _unpack(self, data: bytes) -> TapDescriptor | None:
        # Segments and processes repeat descriptors: equal ones are kept once, and those that are too many counted.
        found = self._descriptors.get(data)
        if found is None and len(self._descriptors) < MAX_DESCRIBED:
            found = self._descriptors[data] = TapDescriptor.unpack(data)
        if found is None:
            self.taps.left_out.add(data)
        return found

    def read_some(self, budget_sec: float) -> bool:
        """Reads found chunks for about that long. Returns whether some are left."""
        ends = time.monotonic() + budget_sec
        while self._pending and time.monotonic() < ends:
            with self.lock:
                number, chunk = self._pending.popleft()
                origin = self.read_chunk(number, chunk)
                if origin is not None:
                    self._take(origin)
                self.version += 1
            self.lock.let_others()
        return bool(self._pending)

    def read_chunk(self, number: int, chunk: Chunk | None = None) -> Origin | None:
        """Reads a chunk from the log (its header may be given); None if it is no longer there. Under `lock`."""
        segment_number, offset = self.chunks.place(number)
        segment = self.files.segments[segment_number]
        try:
            chunk = chunk or segment.chunk_at(offset)
            if chunk is None:
                return None
            block, damage = read_frames(segment, chunk)
            steps = self._steps_of(segment, number, chunk, block)
        except OSError as error:  # its writer deletes old segments
            self.files.note(str(error))
            return None
        if damage is not None and not damage.torn:
            self.files.note(str(damage))
        if not len(block):
            return None
        state = self._state(segment)
        device = segment.devices.get(chunk.stream, "")
        run = Stretch(
            segment.writer, device, block, steps, 0, len(block), state.folded.setdefault(device, {}),
            state.described, segment.path,
        )  # fmt: skip
        return Origin(number, run_of(segment), run)

    def started(self, run_name: str) -> float:
        """When a run began, in Unix seconds. Under `lock`."""
        return min((s.created_ns for s in self.files.segments if run_of(s) == run_name), default=0) / 1e9

    def _steps_of(self, segment: Segment, number: int, chunk: Chunk, block: FrameBlock) -> Array:
        # Chunks are read in any order: those around one are read again if the steps of its messages follow from them.
        finder = self._state(segment).steps
        here = finder.columns(block)
        earlier = BEGINNING if chunk.step_before == NO_STEP else UNKNOWN
        found = finder.find(here, earlier)
        before = self._chunk_before(segment, number, chunk) if found.need_earlier else None
        if before is not None:
            start = BEGINNING if before.step_before == NO_STEP else UNKNOWN
            earlier = start.and_then(finder.columns(read_frames(segment, before)[0]))
            found = finder.find(here, earlier)
        if not found.need_later:
            return found.steps
        later: list[Columns] = []
        messages, nbytes, look_at = 0, 0, 1
        while messages < AHEAD_MESSAGES and nbytes < AHEAD_BYTES and len(later) < AHEAD_CHUNKS:
            after = self._chunk_after(segment, chunk)
            if after is None:
                is_end = self._is_last(segment)
                return finder.find(here, earlier, later, is_end=is_end, guess=True).steps
            later.append(self._columns_of(segment, after, finder))
            chunk, messages, nbytes = (
                after,
                messages + len(later[-1].steps),
                nbytes + after.end - after.offset,
            )
            if len(later) >= look_at:  # each time twice as many
                look_at = 2 * len(later)
                found = finder.find(here, earlier, later)
                if not found.need_later:
                    return found.steps
        return finder.find(here, earlier, later, guess=True).steps

    def _columns_of(self, segment: Segment, chunk: Chunk, finder: StepFinder) -> Columns:
        # The chunks before the same launch's end look into it again.
        key = segment.number, chunk.offset
        known = self._looked_ahead.get(key)
        if known is None:
            known = finder.columns(read_frames(segment, chunk)[0])
            if len(self._looked_ahead) >= AHEAD_CHUNKS:
                del self._looked_ahead[next(iter(self._looked_ahead))]
            if not chunk.is_torn:
                self._looked_ahead[key] = known
        return known

    def _chunk_before(self, segment: Segment, number: int, chunk: Chunk) -> Chunk | None:
        # The chunk of the same device before one in its segment.
        for other in range(number - 1, max(number - CHUNKS_AROUND, 0) - 1, -1):
            of, offset = self.chunks.place(other)
            found = segment.chunk_at(offset) if of == segment.number else None
            if found is not None and found.stream == chunk.stream:
                return found
        return None

    @staticmethod
    def _chunk_after(segment: Segment, chunk: Chunk) -> Chunk | None:
        end = chunk.end
        for _ in range(CHUNKS_AROUND):
            found = segment.chunk_at(end)
            if found is None or (found.kind is Kind.FRAMES and found.stream == chunk.stream):
                return found
            end = found.end
        return None

    def _is_last(self, segment: Segment) -> bool:
        # Whether no more comes after a segment.
        if not segment.is_complete:
            return False
        others = (other for other in self.files.segments if other.writer == segment.writer)
        return all(other.created_ns <= segment.created_ns for other in others)

    def of_run(self, run_name: str) -> Array:
        """A mask of the chunks that belong to a run. Under `lock`."""
        segments = np.array([run_of(segment) == run_name for segment in self.files.segments], np.bool_)
        found: Array = segments[self.chunks.column("segment")]
        return found

    def with_tap(self, tap: Tap, numbers: Array) -> Array:
        """Returns those of some chunks that may have messages of a tap, by run and by the masks in their headers."""
        with self.lock:
            segments = self.chunks.column("segment")[numbers]
            masks = self.chunks.consumers()[numbers]
            wanted = np.zeros(len(self.files.segments), np.uint64)
            found_masks: dict[tuple[int, Writer], int] = {}
            for segment in self.files.segments:
                if run_of(segment) != tap.run:
                    continue
                key = id(segment.numbers), segment.writer
                if key not in found_masks:
                    found_masks[key] = self._mask(segment, tap)
                wanted[segment.number] = found_masks[key]
        found: Array = numbers[((masks & wanted[segments]) != 0) | (masks == np.uint64(ALL_CONSUMERS))]
        return found

    def _mask(self, segment: Segment, tap: Tap) -> int:
        described, mask = self._state(segment).described, 0
        for consumer_id, number in segment.numbers.items():
            known = described.get(consumer_id)
            mask |= (known is not None and known.name == tap.name) << (number & 63)
        return mask

    def read_again(self, number: int, taker: Taker) -> None:
        """Reads a chunk once more, message by message, into `taker`."""
        with self.lock:
            origin = self.read_chunk(number)
            if origin is not None:
                self._reader.read(origin.run, origin.run_name, taker, per_bucket=1)

    def live_segments(self) -> list[Segment]:
        """The segments to which a process may still add messages. Under `lock`."""
        if time.monotonic() - self._alive_at > ALIVE_SEC:
            self._alive_at = time.monotonic()
            self._alive.clear()
        return [segment for segment in self.files.segments if self._is_live(segment)]

    def _is_live(self, segment: Segment) -> bool:
        if segment.reader is None or segment.is_complete:
            return False
        pid = segment.writer.pid
        if segment.writer.host == os.uname().nodename:
            if pid not in self._alive:
                self._alive[pid] = is_alive(pid)
            return self._alive[pid]
        try:
            return time.time() - segment.path.stat().st_mtime < QUIET_SEC
        except OSError:
            return False

    # The parts of a chunk, see `block_reader.Taker`.

    def scalar(self, tap: Tap, part: ScalarPart) -> None:
        """Takes messages of a scalar."""
        tap.count += len(part.values)
        if not part.has_steps or tap.without_step:
            tap.without_step += int((part.steps == NO_STEP).sum())
            tap.buckets.has_steps = tap.without_step * FEW <= tap.count
        tap.buckets.add(part.rows, self.taps.most_buckets)
        if (last := part.times.item(-1)) >= tap.last_time:
            tap.last, tap.last_time = part.values.item(-1), last
        if not part.is_finite:
            tap.note_nonfinite(part.values, part.steps, part.times)

    def times(self, tap: Tap, part: ScalarPart, by_device: dict[str, Array]) -> None:
        """Takes messages of a place that is timed."""
        self.scalar(tap, part)
        ran = {device: runs[~np.isnan(runs)] for device, runs in by_device.items()}
        self.distributions.setdefault((tap.run, tap.name, tap.place), Times()).add({tap.leaf: ran})

    def other(self, tap: Tap, count: int) -> None:
        """Takes messages of a leaf that is not a scalar."""
        tap.count += count
        if tap.chunks and tap.chunks[-1] == self._current:
            tap.counts[-1] += count
        else:
            tap.chunks.append(self._current)
            tap.counts.append(count)
        if tap.kind == "text":
            self._count_texts(count)

    def check(self, run: Stretch, described: TapDescriptor, places: Array) -> None:
        """Takes failures of a check."""
        self.failures.checked(run, described, places)
        self._count_texts(len(places))

    def _count_texts(self, count: int) -> None:
        self.chunks.add_texts(self._current, count)
        self.texts += count

    def _take(self, origin: Origin) -> None:
        self._current = origin.number
        run = origin.run
        count = len(run.block)
        self.messages[origin.run_name] = self.messages.get(origin.run_name, 0) + count
        self.devices.add(origin.run_name, run)
        per_bucket = 1 if self.messages[origin.run_name] <= SINGLE_MESSAGES else buckets.MESSAGES
        self._reader.read(run, origin.run_name, self, per_bucket=per_bucket)

    def _note(self, segment: Segment, chunk: Chunk) -> None:
        reader = segment.reader
        if reader is None:
            return
        read = {
            Kind.LOST: reader.lost_in,
            Kind.EXCEPTIONS: reader.exceptions_in,
            Kind.FOLDED: reader.folded_in,
        }
        told: Any = read[Kind(chunk.kind)](chunk)
        if isinstance(told, Damage):
            self.files.note(str(told))
        elif chunk.kind is Kind.LOST:
            self.failures.lost(segment.writer, told)
            self.devices.lost(run_of(segment), segment.writer, told, segment.path)
        elif chunk.kind is Kind.EXCEPTIONS:
            self.failures.raised(segment.writer, told)
        else:
            device = segment.devices.get(chunk.stream, "")
            self._state(segment).folded.setdefault(device, {}).update(told)

    def _state(self, segment: Segment) -> _WriterState:
        state = self._writers.get(segment.writer)
        if state is None:
            described: dict[int, TapDescriptor] = {}
            state = self._writers[segment.writer] = _WriterState(described, StepFinder(described), {})
        return state

    def _take_consumers(self, segment: Segment) -> None:
        # Descriptors are kept once per process, and equal numbers once: segments repeat them.
        if len(segment.numbers) < len(segment.consumers):
            state = self._state(segment)
            for consumer_id, (_, described) in segment.consumers.items():
                if len(state.described) < MAX_DESCRIBED:
                    state.described.setdefault(consumer_id, described)
            numbers = {consumer_id: number for consumer_id, (number, _) in segment.consumers.items()}
            known = self._numbers.setdefault(len(numbers), numbers)
            segment.numbers = known if known == numbers else numbers
        if segment.reader is None:
            segment.consumers = {}


def run_of(segment: Segment) -> str:
    """Name of the run of a segment; of earlier versions, which named none, the folder's name."""
    return segment.writer.run or segment.path.parent.name or "log"


def _coarse_first(numbers: Iterable[_T]) -> list[_T]:
    # Every 1,024th chunk first, then those between: the first chart shows the whole log, coarsely.
    given = list(numbers)
    order: list[_T] = []
    step = 1024
    while step > 1:
        order += given[::step] if step == 1024 else given[step :: 2 * step]
        step //= 2
    return order + given[1::2] if len(given) > 1 else given
