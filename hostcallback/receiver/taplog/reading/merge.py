"""Merges the messages of several processes by time."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import errors, limits
from hostcallback.receiver.messages import Message
from hostcallback.receiver.taplog.format import layout, step_finder
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class Stretch(NamedTuple):
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

    def step_of(self, message: Message) -> int | None:
        """The step of one of its messages; None if it is not known, or the message is another's."""
        return self.step_at(message.seq, message.time_ns)

    def step_at(self, seq: int, time_ns: int) -> int | None:
        """The same for a message of that number, emitted at that time."""
        place = int(np.searchsorted(self.block.seqs, seq))
        if place == len(self.steps) or self.block.times[place] != time_ns:
            return None
        step = int(self.steps[place])
        return None if step == layout.NO_STEP else step


class LostNote(NamedTuple):
    """A note of lost messages, and the process that wrote it."""

    writer: Writer
    lost: layout.Lost


Record = Stretch | LostNote | layout.Damage

NOTES = (layout.Kind.LOST, layout.Kind.FOLDED)
"""Kinds of chunks that describe messages that are not in the log."""


def read_note(
    segment: SegmentReader, chunk: Chunk, folded: dict[int, int]
) -> Iterator[LostNote | layout.Damage]:
    """Reads a chunk of such a kind. Counts of left out failures go into `folded`, by sequence number."""
    found = segment.lost_in(chunk) if chunk.kind is layout.Kind.LOST else segment.folded_in(chunk)
    if isinstance(found, layout.Damage):
        yield found
    elif isinstance(found, layout.Lost):
        yield LostNote(segment.writer, found)
    else:
        room = max(0, limits.FOLDED - len(folded))
        folded.update(itertools.islice(found.items(), room))


class _Placed(NamedTuple):
    # A chunk, and whether its header allows selected messages and selected steps.
    segment: SegmentReader
    chunk: Chunk
    is_wanted: bool = True
    has_steps: bool = True

    @property
    def key(self) -> tuple[Path, int]:
        return self.segment.path, self.chunk.offset


class _Read(NamedTuple):
    # A chunk that was read.
    block: FrameBlock
    damage: layout.Damage | None
    columns: step_finder.Columns


class _Stream:
    # The unread chunks of one device, and the rest of the chunk that is being read.

    def __init__(self, device: str) -> None:
        self.device = device
        self.chunks: deque[_Placed] = deque()
        self.ahead: dict[tuple[Path, int], _Read] = {}
        self.earlier: step_finder.Earlier | None = None  # than the next chunk; None before the first one
        self.left_out: list[_Placed] = []  # the first chunk and the last two, if they are not wanted
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
        return self.chunks[0].chunk.min_time_ns


class _Process:
    # The segments of one process, oldest first, and its devices.

    def __init__(self, writer: Writer, paths: Sequence[Path], selection: Selection) -> None:
        self.writer = writer
        self.described: dict[int, TapDescriptor] = {}
        self._paths = deque(paths)
        self._selection = selection
        self._streams: dict[str, _Stream] = {}
        self._next: list[tuple[str, _Placed]] | None = None
        self._steps = step_finder.StepFinder(self.described)
        self.damage: list[layout.Damage] = []

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
        return min((placed.chunk.min_time_ns for _, placed in self._next), default=-(2**63))

    def take(self) -> list[_Stream]:
        """Starts the next segment; returns the streams that have something to read."""
        assert self._next is not None
        placed, self._next = self._next, None
        for device, item in placed:
            self._streams.setdefault(device, _Stream(device)).chunks.append(item)
        return [stream for stream in self._streams.values() if not stream.is_empty]

    def _open(self, path: Path) -> list[tuple[str, _Placed]] | None:
        try:
            segment = SegmentReader(path)
        except FileNotFoundError:  # its writer deletes old segments
            return None
        except (errors.NotATapLogError, OSError) as error:  # it was damaged since its first look
            self.damage.append(_of_file(path, error))
            return None
        chunks: list[tuple[str, Chunk]] = []
        for item in segment.chunks():
            if isinstance(item, layout.Damage):
                self.damage.append(item)
            elif item.kind not in (
                layout.Kind.RULES,
                layout.Kind.EXCEPTIONS,
            ):  # the reader, and `hcb ui`, ask for them
                chunks.append((segment.devices.get(item.stream, ""), item))
        # Descriptors stay for later segments: runs that were yielded refer to this dict.
        for consumer_id, (_, described) in segment.consumers.items():
            self.described.setdefault(consumer_id, described)
        wants = self._selection.wants_name
        wanted = {number: wants(described.name) for number, described in segment.consumers.values()}
        found: list[tuple[str, _Placed]] = []
        for device, chunk in chunks:
            if chunk.kind in NOTES:
                found.append((device, _Placed(segment, chunk)))
            elif self._selection.wants_device(device):
                is_wanted, has_steps = (
                    self._selection.wants_chunk(chunk, wanted),
                    self._selection.wants_steps(chunk),
                )
                found.append((device, _Placed(segment, chunk, is_wanted, has_steps)))
        return found

    def load(self, stream: _Stream) -> Iterator[Record]:
        """Reads a stream up to the next wanted frames; yields the records before them."""
        while stream.block is None and stream.chunks:
            placed = stream.chunks.popleft()
            segment, chunk = placed.segment, placed.chunk
            if chunk.kind in NOTES:
                yield from read_note(segment, chunk, stream.folded)
            elif chunk.kind is not layout.Kind.FRAMES:
                yield chunk.damage(segment.path, f"a chunk of the unknown kind {int(chunk.kind)}")
            elif placed.is_wanted and self._may_have_steps(stream, placed):
                read = stream.ahead.pop(placed.key, None) or self._read(placed)
                if read.damage is not None:
                    yield read.damage
                stream.path = segment.path
                self._begin(stream, read, placed)
            else:
                stream.ahead.pop(placed.key, None)
                stream.earlier = step_finder.UNKNOWN
                stream.left_out = [*stream.left_out[:1], *stream.left_out[1:][-1:], placed]

    def _upcoming(self, stream: _Stream) -> Iterator[_Placed]:
        # The next chunks of messages of a device.
        for placed in stream.chunks:
            if placed.chunk.kind is layout.Kind.FRAMES:
                yield placed
        for device, placed in self._next or ():
            if device == stream.device and placed.chunk.kind is layout.Kind.FRAMES:
                yield placed

    def _may_have_steps(self, stream: _Stream, placed: _Placed) -> bool:
        # The last messages of a chunk may belong to the first step after it.
        if placed.has_steps:
            return True
        messages = 0
        for later in self._upcoming(stream):
            if later.has_steps:
                return True
            chunk = later.chunk
            messages += chunk.messages
            if (
                messages >= step_finder.AHEAD_MESSAGES
                or not chunk.min_step == chunk.max_step == chunk.step_before
            ):
                return False
        return False

    def _read(self, placed: _Placed) -> _Read:
        block, damage = read_frames(placed.segment, placed.chunk)
        return _Read(block, damage, self._steps.columns(block))

    def _begin(self, stream: _Stream, read: _Read, placed: _Placed) -> None:
        block = read.block
        if not len(block):
            return
        selection = self._selection
        steps = self._steps_of(stream, read, placed)
        mask = selection.choose(block, steps)
        if selection.names:
            mask &= self._named(block)
        if mask.any():
            stream.block, stream.steps, stream.done = block.chosen(mask), steps[mask], 0

    def _steps_of(self, stream: _Stream, read: _Read, placed: _Placed) -> Array:
        earlier = stream.earlier
        if earlier is None:
            earlier = _start_of(placed)
        found = self._steps.find(read.columns, earlier)
        # Also for what comes later: the launches before show whether those of these taps have one step.
        if (found.need_earlier or found.need_later) and stream.left_out and earlier is step_finder.UNKNOWN:
            for number, left_out in enumerate(stream.left_out):
                before = self._read(left_out).columns
                follows = 0 < number == len(stream.left_out) - 1  # the last two follow each other
                start = earlier if follows else _start_of(left_out)
                self._steps.find(before, start)  # learns of the taps
                earlier = start.and_then(before)
            found = self._steps.find(read.columns, earlier)
        stream.left_out.clear()
        if found.need_later:
            found = self._with_later(stream, read, earlier, placed.segment)
        stream.earlier = earlier.and_then(read.columns)
        return found.steps

    def _with_later(
        self, stream: _Stream, read: _Read, earlier: step_finder.Earlier, segment: SegmentReader
    ) -> step_finder.Steps:
        # Looks into the next chunks of the device for the end of the launch, each time into twice as many.
        later: list[step_finder.Columns] = []
        messages, nbytes, look_at = 0, 0, 1
        for placed in self._upcoming(stream):
            if (
                messages >= step_finder.AHEAD_MESSAGES
                or nbytes >= step_finder.AHEAD_BYTES
                or len(later) >= step_finder.AHEAD_CHUNKS
            ):
                return self._steps.find(read.columns, earlier, later, guess=True)
            known = stream.ahead.get(placed.key)
            if known is None:
                known = stream.ahead[placed.key] = self._read(placed)
            later.append(known.columns)
            segment = placed.segment
            messages += len(known.block)
            nbytes += known.block.data.nbytes
            if len(later) >= look_at:
                look_at = 2 * len(later)
                found = self._steps.find(read.columns, earlier, later)
                if not found.need_later:
                    return found
        is_end = not self._paths and segment.is_closed()
        return self._steps.find(read.columns, earlier, later, is_end=is_end, guess=True)

    def _named(self, block: FrameBlock) -> Array:
        # Messages that carry their tap's descriptor, as those of exported programs do, are selected after decoding.
        wants, described = self._selection.wants_name, self.described
        unwanted = [
            consumer_id
            for consumer_id in block.consumers
            if consumer_id in described and not wants(described[consumer_id].name)
        ]
        return ~np.isin(block.consumer_ids, np.array(unwanted, np.uint64))


def _start_of(placed: _Placed) -> step_finder.Earlier:
    # What is known before a chunk by its header alone.
    return step_finder.BEGINNING if placed.chunk.step_before == layout.NO_STEP else step_finder.UNKNOWN


def _of_file(path: Path, error: Exception) -> layout.Damage:
    torn = isinstance(error, errors.CutOffLogError)
    try:
        nbytes = path.stat().st_size
    except OSError:
        nbytes = 0
    return layout.Damage(path, 0, nbytes, 0 if torn else -1, str(error), torn)


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
    limited to one chunk per device, the following ones of `AHEAD_MESSAGES` messages, and the headers of two segments
    per process.
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


def _feed(heap: list[Any], count: Iterator[int], process: _Process) -> Iterator[layout.Damage]:
    time_ns = process.peek()
    yield from process.damage
    process.damage.clear()
    if time_ns is not None:
        heapq.heappush(heap, (time_ns, next(count), process, None))


def _run(process: _Process, stream: _Stream, until_ns: int | None) -> Stretch:
    block = stream.block
    assert block is not None
    start, stop = stream.done, len(block)
    if until_ns is not None:
        # A device's clock goes back only if it is corrected: then some messages come slightly too early.
        stop = bisect.bisect_right(block.times, until_ns, start + 1)
    stream.done = stop
    if stop == len(block):
        stream.block = None
    return Stretch(
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
