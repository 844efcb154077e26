"""Merges the messages of several processes by time, each once, also if several logs have it."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.taplog.format.block import FrameBlock, StepColumns
from hostcallback.receiver.taplog.format.errors import CutOffLogError, Damage, Lost, NotATapLogError
from hostcallback.receiver.taplog.format.layout import Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class MessageRun(NamedTuple):
    """Consecutive messages of one device: a part of a block.

    Attributes:
        writer: the process.
        device: name of the device.
        block: the frames of the run, and others around them.
        steps: step of each message of the block, int64, shape (frames,), or `NO_STEP`.
        start: index in the block at which the run starts.
        stop: index after its last message.
        folded: number of failures of the same check that were left out before a message, by sequence number.
        described: the process's descriptors, by consumer id.
        path: of the segment.
    """

    writer: Writer
    device: str
    block: FrameBlock
    steps: Array
    start: int
    stop: int
    folded: dict[int, int]
    described: dict[int, TapDescriptor]
    path: Path


class LostRun(NamedTuple):
    """A note of lost messages, and the process that wrote it."""

    writer: Writer
    lost: Lost


Record = MessageRun | LostRun | Damage

NOTES = (Kind.LOST, Kind.FOLDED)
"""Kinds of chunks that describe messages that are not in the log."""


def read_note(segment: SegmentReader, chunk: Chunk, folded: dict[int, int]) -> Iterator[LostRun | Damage]:
    """Reads a chunk of such a kind. Counts of left out failures go into `folded`, by sequence number."""
    found = segment.lost_in(chunk) if chunk.kind is Kind.LOST else segment.folded_in(chunk)
    if isinstance(found, Damage):
        yield found
    elif isinstance(found, Lost):
        yield LostRun(segment.writer, found)
    else:
        room = max(0, limits.FOLDED - len(folded))
        folded.update(itertools.islice(found.items(), room))


class _Stream:
    # The unread chunks of one device, and the rest of the chunk that is being read.

    def __init__(self, device: str) -> None:
        self.device = device
        self.chunks: deque[tuple[SegmentReader, Chunk]] = deque()
        self.block: FrameBlock | None = None
        self.path = Path()
        self.steps: Array = np.empty(0, np.int64)
        self.folded: dict[int, int] = {}
        self.done = 0
        self.queued = False

    @property
    def is_empty(self) -> bool:
        return self.block is None and not self.chunks

    @property
    def time_ns(self) -> int:
        if self.block is not None:
            return self.block.times[self.done]
        return self.chunks[0][1].min_time_ns


class _Process:
    # The segments of one process, oldest first, and its devices.

    def __init__(self, writer: Writer, paths: Sequence[Path], selection: Selection) -> None:
        self.writer = writer
        self.described: dict[int, TapDescriptor] = {}
        self._paths = deque(paths)
        self._selection = selection
        self._streams: dict[str, _Stream] = {}
        self._next: tuple[SegmentReader, list[tuple[str, Chunk]]] | None = None
        self._steps = StepColumns(self.described.get)
        self.damage: list[Damage] = []

    @property
    def device_count(self) -> int:
        """Number of devices that have had messages so far."""
        return len(self._streams)

    def peek(self) -> int | None:
        """Earliest emission time in the next segment; None if there is no further segment."""
        while self._next is None and self._paths:
            self._next = self._open(self._paths.popleft())
        if self._next is None:
            return None
        return min((chunk.min_time_ns for _, chunk in self._next[1]), default=-(2**63))

    def take(self) -> list[_Stream]:
        """Starts the next segment; returns the streams that have something to read."""
        assert self._next is not None
        segment, chunks = self._next
        self._next = None
        for device, chunk in chunks:
            self._streams.setdefault(device, _Stream(device)).chunks.append((segment, chunk))
        return [stream for stream in self._streams.values() if not stream.is_empty]

    def _open(self, path: Path) -> tuple[SegmentReader, list[tuple[str, Chunk]]] | None:
        try:
            segment = SegmentReader(path)
        except FileNotFoundError:  # its writer deletes old segments
            return None
        except (NotATapLogError, OSError) as error:  # it was damaged since its first look
            self.damage.append(_of_file(path, error))
            return None
        chunks: list[tuple[str, Chunk]] = []
        for item in segment.chunks():
            if isinstance(item, Damage):
                self.damage.append(item)
            elif item.kind not in (Kind.RULES, Kind.EXCEPTIONS):  # the reader, and `hcb ui`, ask for them
                chunks.append((segment.devices.get(item.stream, ""), item))
        # Descriptors stay for later segments: runs that were yielded refer to this dict.
        for consumer_id, (_, described) in segment.consumers.items():
            self.described.setdefault(consumer_id, described)
        wants = self._selection.wants_name
        wanted = {number: wants(described.name) for number, described in segment.consumers.values()}
        chosen = [
            (device, chunk)
            for device, chunk in chunks
            if chunk.kind in NOTES
            or (self._selection.wants_device(device) and self._selection.wants_chunk(chunk, wanted))
        ]
        return segment, chosen

    def load(self, stream: _Stream) -> Iterator[Record]:
        """Reads a stream up to the next wanted frames; yields the records before them."""
        while stream.block is None and stream.chunks:
            segment, chunk = stream.chunks.popleft()
            if chunk.kind in NOTES:
                yield from read_note(segment, chunk, stream.folded)
            elif chunk.kind is Kind.FRAMES:
                block, damage = read_frames(segment, chunk)
                if damage is not None:
                    yield damage
                stream.path = segment.path
                self._begin(stream, block, chunk)
            else:
                yield chunk.damage(segment.path, f"a chunk of the unknown kind {int(chunk.kind)}")

    def _begin(self, stream: _Stream, block: FrameBlock, chunk: Chunk) -> None:
        if not len(block):
            return
        selection = self._selection
        steps = (
            # With one step in the chunk, no message has to be decoded to find the steps.
            np.full(len(block), chunk.min_step, np.int64)
            if chunk.min_step == chunk.max_step
            else self._steps.of(block, chunk.step_before)
        )
        mask = selection.choose(block.times_ns, steps)
        if selection.names:
            mask &= self._named(block)
        if mask.any():
            stream.block, stream.steps, stream.done = block.chosen(mask), steps[mask], 0

    def _named(self, block: FrameBlock) -> Array:
        # Messages that carry their tap's descriptor, as those of exported programs do, are selected after decoding.
        wants, described = self._selection.wants_name, self.described
        unwanted = [
            consumer_id
            for consumer_id in block.consumers
            if consumer_id in described and not wants(described[consumer_id].name)
        ]
        return ~np.isin(block.consumer_ids, np.array(unwanted, np.uint64))


def _of_file(path: Path, error: Exception) -> Damage:
    torn = isinstance(error, CutOffLogError)
    try:
        nbytes = path.stat().st_size
    except OSError:
        nbytes = 0
    return Damage(path, 0, nbytes, 0 if torn else -1, str(error), torn)


class Order(Protocol):
    """Protocol that adds conditions to the order by time in which processes are read."""

    def is_paused(self, writer: Writer, devices: int) -> bool:
        """Whether a process with that many known devices must wait until others have been read further."""

    def evict_oldest(self) -> None:
        """Called when all remaining processes wait: lets some continue; may need several calls."""


def merged(
    processes: Sequence[tuple[Writer, Sequence[Path]]],
    selection: Selection,
    *,
    by_time: bool,
    order: Order | None = None,
) -> Iterator[Record]:
    """Yields all records of the segments of some processes; each device's messages stay in order.

    With `by_time`, a run ends where messages of another device come between; without it, runs are as long as possible.
    `order` is asked before each run.

    The devices of a process are in order of time, unless a receiver was behind by more than a segment. Memory is
    limited to one chunk per device and the headers of two segments per process.
    """
    count = itertools.count()
    heap: list[tuple[int, int, _Process, _Stream | None]] = []
    for writer, paths in processes:
        process = _Process(writer, paths, selection)
        yield from _feed(heap, count, process)
    # Entries without a stream stand for a process's next segment, which is opened when its time has come.
    held: list[tuple[int, int, _Process, _Stream | None]] = []
    while heap or held:
        if order is not None and held:
            if not heap:
                order.evict_oldest()
            held = _let_go(heap, held, order)
            if not heap:
                continue
        _, _, process, stream = top = heapq.heappop(heap)
        if order is not None and order.is_paused(process.writer, process.device_count):
            held.append(top)
            continue
        if stream is None:
            for ready in process.take():
                if not ready.queued:
                    ready.queued = True
                    heapq.heappush(heap, (ready.time_ns, next(count), process, ready))
            yield from _feed(heap, count, process)
            continue
        stream.queued = False
        if stream.block is None:
            # The chunk's time was only a bound from its header; now its messages are read.
            yield from process.load(stream)
        else:
            yield _run(process, stream, heap[0][0] if heap and by_time else None)
        if not stream.is_empty:
            stream.queued = True
            heapq.heappush(heap, (stream.time_ns, next(count), process, stream))


def _let_go(heap: list[Any], held: list[Any], order: Order) -> list[Any]:
    left = []
    for item in held:
        if order.is_paused(item[2].writer, item[2].device_count):
            left.append(item)
        else:
            heapq.heappush(heap, item)
    return left


def _feed(heap: list[Any], count: Iterator[int], process: _Process) -> Iterator[Damage]:
    time_ns = process.peek()
    yield from process.damage
    process.damage.clear()
    if time_ns is not None:
        heapq.heappush(heap, (time_ns, next(count), process, None))


def _run(process: _Process, stream: _Stream, until_ns: int | None) -> MessageRun:
    block = stream.block
    assert block is not None
    start, stop = stream.done, len(block)
    if until_ns is not None:
        # A device's clock goes back only if it is corrected: then some messages come slightly too early.
        stop = bisect.bisect_right(block.times, until_ns, start + 1)
    stream.done = stop
    if stop == len(block):
        stream.block = None
    return MessageRun(
        process.writer,
        stream.device,
        block,
        stream.steps,
        start,
        stop,
        stream.folded,
        process.described,
        stream.path,
    )


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
