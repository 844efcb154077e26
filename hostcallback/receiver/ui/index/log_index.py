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
from hostcallback.receiver.sinks.time_rows import Times
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, NO_STEP, Damage, Kind
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.ui.index import buckets
from hostcallback.receiver.ui.index.block_reader import BlockReader, ScalarPart, Taker
from hostcallback.receiver.ui.index.buckets import ChunkTable
from hostcallback.receiver.ui.index.chunk_steps import ChunkSteps
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

SMALL_MESSAGES, SMALL_BYTES, TOGETHER = 64, 64 << 10, 64
"""Limits of the messages and bytes of a small chunk, and of how many are read together: each look at many logs that
grow slowly finds one in each, and numpy's calls cost more than their messages."""

MAX_ALIKE = 4096
"""Sets of taps of which is remembered that their messages are scalars alone."""

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


class _Read(NamedTuple):
    # The messages of a chunk, before their steps are known. `alike` is equal for chunks of equal taps of a run.
    number: int
    segment: Segment
    chunk: Chunk
    block: FrameBlock
    alike: tuple[Any, ...] | None


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
        self._writers: dict[Writer, _WriterState] = {}
        self._chunk_steps = ChunkSteps(self.files, self.chunks)
        self._reader = BlockReader(self.taps)
        self._current = 0
        self._not_scalars = 0
        self._scalars: dict[
            tuple[Any, ...], bytes
        ] = {}  # by `alike`: the metadata of messages that are scalars alone
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
                self._read_next()
                self.version += 1
            self.lock.let_others()
        return bool(self._pending)

    def read_chunk(self, number: int) -> Origin | None:
        """Reads a chunk from the log; None if it is no longer there. Under `lock`."""
        read = self._read(number)
        return None if read is None else self._with_steps(read)

    def _read_next(self) -> None:
        found = [self._pending.popleft()]
        while _is_small(found[-1][1]) and len(found) < TOGETHER and self._pending:
            found.append(self._pending.popleft())
        alike: dict[Any, list[_Read]] = {}
        faults: list[Exception] = []  # of a hostile log; the other chunks are read all the same
        for number, chunk in found:
            try:
                read = self._read(number, chunk)
            except Exception as error:
                faults.append(error)
            else:
                if read is not None:
                    alike.setdefault(read.alike or number, []).append(read)
        for reads in alike.values():
            try:
                self._take_all(reads)
            except Exception as error:
                faults.append(error)
        if faults:
            raise faults[0]

    def _take_all(self, reads: list[_Read]) -> None:
        if len(reads) > 1 and self._take_together(reads):
            return
        for read in reads:
            origin = self._with_steps(read)
            if origin is not None:
                self._take(origin, read.alike)

    def _read(self, number: int, chunk: Chunk | None = None) -> _Read | None:
        segment_number, offset = self.chunks.place(number)
        segment = self.files.segments[segment_number]
        is_small = _is_small(chunk)
        try:
            chunk = chunk or segment.chunk_at(offset)
            if chunk is None:
                return None
            block, damage = read_frames(segment, chunk)
        except OSError as error:  # its writer deletes old segments
            self.files.note(str(error))
            return None
        if damage is not None and not damage.torn:
            self.files.note(str(damage))
        if not len(block):
            return None
        alike: tuple[Any, ...] | None = None
        if is_small:
            described = self._state(segment).described
            taps = [described.get(consumer_id) for consumer_id in block.consumers]
            # Equal descriptors are one object, see `_unpack`.
            alike = None if None in taps else (run_of(segment), *sorted(map(id, taps)))
        return _Read(number, segment, chunk, block, alike)

    def _with_steps(self, read: _Read) -> Origin | None:
        number, segment, chunk, block, _ = read
        try:
            steps = self._chunk_steps.of(self._state(segment).steps, segment, number, chunk, block)
        except OSError as error:
            self.files.note(str(error))
            return None
        return Origin(number, run_of(segment), self._run(read, steps))

    def _run(self, read: _Read, steps: Array) -> Stretch:
        segment, state = read.segment, self._state(read.segment)
        device = segment.devices.get(read.chunk.stream, "")
        return Stretch(
            segment.writer, device, read.block, steps, 0, len(read.block), state.folded.setdefault(device, {}),
            state.described, segment.path,
        )  # fmt: skip

    def started(self, run_name: str) -> float:
        """When a run began, in Unix seconds. Under `lock`."""
        return min((s.created_ns for s in self.files.segments if run_of(s) == run_name), default=0) / 1e9

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
        at = len(part.times) - 1 - int(part.times[::-1].argmax())  # of several devices, see `_take_together`
        if (last := part.times.item(at)) >= tap.last_time:
            tap.last, tap.last_time = part.values[at].item(-1), last
        if not part.is_finite:
            tap.note_nonfinite(part.values, part.steps, part.times)

    def times(self, tap: Tap, part: ScalarPart, by_device: dict[str, Array]) -> None:
        """Takes messages of a place that is timed."""
        self.scalar(tap, part)
        # Of several calls at once: the page shows no `max_at` of a row, and looks for the slowest when asked.
        known = self.distributions.setdefault((tap.run, tap.name, tap.place), Times(most_slowest=0))
        known.add({tap.leaf: by_device})

    def other(self, tap: Tap, count: int) -> None:
        """Takes messages of a leaf that is not a scalar."""
        self._not_scalars += 1
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
        self._not_scalars += 1
        self.failures.checked(run, described, places)
        self._count_texts(len(places))

    def _count_texts(self, count: int) -> None:
        self.chunks.add_texts(self._current, count)
        self.texts += count

    def _take(self, origin: Origin, alike: tuple[Any, ...] | None) -> None:
        self._current = origin.number
        run, before = origin.run, self._not_scalars
        self._count(origin)
        per_bucket = 1 if self.messages[origin.run_name] <= SINGLE_MESSAGES else buckets.MESSAGES
        self._reader.read(run, origin.run_name, self, per_bucket=per_bucket)
        if alike is not None and self._not_scalars == before and self._reader.is_plain(run):
            if len(self._scalars) >= MAX_ALIKE:
                self._scalars.clear()
            self._scalars[alike] = run.block.metadata(0)

    def _count(self, origin: Origin) -> None:
        self.messages[origin.run_name] = self.messages.get(origin.run_name, 0) + len(origin.run.block)
        self.devices.add(origin.run_name, origin.run)

    def _take_together(self, reads: list[_Read]) -> bool:
        # Takes chunks of equal taps as one; returns False if they have to be taken one by one.
        first = reads[0]
        known = self._scalars.get(first.alike or ())
        if known is None:
            return False
        block = FrameBlock.join([read.block for read in reads])
        if len(block.alike) > 1 or block.metadata(0) != known:
            return False
        finders = {id(finder): finder for finder in (self._state(read.segment).steps for read in reads)}
        columns = self._state(first.segment).steps.columns(block)
        if not all(finder.are_alone(columns) for finder in finders.values()):
            return False
        run_name, at = run_of(first.segment), 0
        for read in reads:
            steps = columns.steps[at : (at := at + len(read.block))]
            self._count(Origin(read.number, run_name, self._run(read, steps)))
        run = self._run(first, columns.steps)._replace(block=block, stop=len(block))
        self._reader.read(run, run_name, self, per_bucket=1)
        return True

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


def _is_small(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.messages <= SMALL_MESSAGES and chunk.raw_bytes <= SMALL_BYTES


def _coarse_first(numbers: Iterable[_T]) -> list[_T]:
    # Every 1,024th chunk first, then those between: the first chart shows the whole log, coarsely.
    given = list(numbers)
    order: list[_T] = []
    step = 1024
    while step > 1:
        order += given[::step] if step == 1024 else given[step :: 2 * step]
        step //= 2
    return order + given[1::2] if len(given) > 1 else given
