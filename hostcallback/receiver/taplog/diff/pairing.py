"""Pairs the messages of two logs: the n-th message of a tap in one log with the n-th in the other.

Messages of a device are read from both logs in turn. The order in which taps send does not matter, as long as the
unpaired messages fit into `PENDING_BYTES`. If messages are missing in one log, as many are passed over in the other.
"""

from __future__ import annotations

import glob
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, Damage, Kind, Lost
from hostcallback.receiver.taplog.reading import chunk_reader, reader, segment_reader, selection
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, process_of
from hostcallback.receiver.wire.tap_descriptor import PROGRESS

TapKey = tuple[str, str, str]
"""Identity of a tap in its program: name, source line, transformations."""

REST = 2**62
"""Length of a gap that reaches to the end of the log, and is unknown."""


class Gap(NamedTuple):
    """A gap: messages were dropped, or their part of the log is damaged.

    Attributes:
        messages: number of missing messages.
    """

    messages: int


class DeviceKey(NamedTuple):
    """A device of a program.

    Attributes:
        process: index of its process in the program; 0 for a program of one process.
        device: its name.
    """

    process: int
    device: str


class ComparedLog:
    """A log by the devices of its program. The constructor reads the headers of all segments.

    Attributes:
        reader: of the log.
        devices: the devices that sent messages.
        damaged: damaged parts found so far.
        bars: names of progress bars.
        others: names of other taps.
    """

    def __init__(self, path: reader.Paths, *, ignore_lines: bool, run: str | None = None) -> None:
        """Scans the log.

        Args:
            path: a folder with a log, a segment, or several of them.
            ignore_lines: taps of one name are one tap, even if their source lines differ.
            run: see `LogReader`.

        Raises:
            TapLogError: it is not a tap log.
            OSError: it cannot be read.
        """
        self.reader = reader.LogReader(path, run=run)
        self._ignore_lines = ignore_lines
        self.devices: set[DeviceKey] = set()
        self.damaged: list[Damage] = []
        self._lost: dict[tuple[segment_reader.Writer, str], list[Lost]] = {}
        self._keys: set[TapKey] = set()
        self.bars: set[str] = set()
        self.others: set[str] = set()
        self._all_described = True
        for writer, segment in self.reader.segments():
            self._scan(writer, segment)

    @property
    def tap_names(self) -> set[str]:
        """Names of the taps whose messages are in the log."""
        return {name for name, _, _ in self._keys}

    def lacks(self, key: TapKey) -> bool:
        """Whether the log certainly has no message of a tap."""
        return self._all_described and not self._lost and key not in self._keys

    def key_of(self, logged: LoggedMessage) -> TapKey:
        """Identity of a message's tap."""
        consumer = logged.message.consumer
        return self._key(consumer.name, consumer.source_line, consumer.transforms)

    def emissions(self, key: DeviceKey) -> Iterator[LoggedMessage | Gap]:
        """Messages of a device in order. If the program was started several times, its runs follow each other."""
        for writer in self.reader.writers:
            if process_of(writer) == key.process:
                yield from self._of_writer(writer, key.device)

    def _of_writer(self, writer: segment_reader.Writer, device: str) -> Iterator[LoggedMessage | Gap]:
        lost = self._lost.get((writer, device), [])
        seq = -1
        damaged = 0  # messages in damaged parts that no gap in the numbers has shown yet
        for record in self.reader.of(writer).records(selection.Selection(devices=(glob.escape(device),))):
            if isinstance(record, Damage):
                if not record.torn:
                    self.damaged.append(record)
                    damaged += REST if record.messages < 0 else record.messages
            elif isinstance(record, LoggedMessage):
                first, stop = seq + 1, record.message.seq - record.folded
                missing = _missing(lost, first, stop)
                if damaged and first < stop:
                    missing = min(stop - first, missing + damaged)
                    damaged = 0
                if missing:
                    yield Gap(missing)
                seq = record.message.seq
                yield record
        if missing := REST if damaged else _missing(lost, seq + 1, REST):
            yield Gap(missing)

    def _scan(self, writer: segment_reader.Writer, segment: segment_reader.SegmentReader) -> None:
        for chunk in segment.chunks():
            if not isinstance(chunk, chunk_reader.Chunk):
                self._all_described = False
            elif chunk.kind is Kind.FRAMES:
                self.devices.add(DeviceKey(process_of(writer), segment.devices.get(chunk.stream, "")))
                # The messages of exported programs name their taps themselves, so any tap may be among them.
                self._all_described &= chunk.consumers != ALL_CONSUMERS
            elif chunk.kind is Kind.LOST:
                lost = segment.lost_in(chunk)
                if isinstance(lost, Lost):
                    self._lost.setdefault((writer, lost.device), []).append(lost)
        for _, described in segment.consumers.values():
            self._keys.add(self._key(described.name, described.source_line, described.transforms))
            (self.bars if described.tap_kind is PROGRESS else self.others).add(described.name)

    def _key(self, name: str, source_line: str, transforms: object) -> TapKey:
        return name, "" if self._ignore_lines else source_line, repr(transforms)


def _missing(lost: list[Lost], first: int, stop: int) -> int:
    # Number of sequence numbers in [first, stop) that were lost. Other missing numbers are not messages, but ends of
    # receivers' scopes.
    ranges = ((note.first_seq, max(note.last_seq + 1, note.first_seq + note.messages)) for note in lost)
    count = sum(max(0, min(end, stop) - max(start, first)) for start, end in ranges)
    return min(count, max(0, stop - first))


PENDING_BYTES = 64 << 20

_OBJECTS_BYTES = 1024
"""Memory of a message in addition to its elements."""


class Pair(NamedTuple):
    """Two messages that belong together.

    Attributes:
        position: in the device's stream of the first log.
        a: message of the first log.
        b: message of the second log.
    """

    position: float
    a: LoggedMessage
    b: LoggedMessage


class Single(NamedTuple):
    """A message without a counterpart.

    Attributes:
        position: in the first log, where the message is or would be.
        in_a: whether the first log has it.
        logged: the message.
        reason: why it has no counterpart.
    """

    position: float
    in_a: bool
    logged: LoggedMessage
    reason: str


class Unaligned(NamedTuple):
    """After missing messages it is unknown which messages correspond: the rest of a device is not compared.

    Attributes:
        a: message after the gap in the first log.
        b: message after the gap in the second log.
    """

    a: LoggedMessage
    b: LoggedMessage


class _Waiting(NamedTuple):
    occurrence: int
    position: int
    logged: LoggedMessage

    @property
    def nbytes(self) -> int:
        return _OBJECTS_BYTES + sum(array.nbytes for array in self.logged.message.arrays)


@dataclass(slots=True)
class _Side:
    # The state of one of the two logs.

    items: Iterator[LoggedMessage | Gap]
    lacks: Callable[[TapKey], bool]
    counts: Counter[TapKey] = field(default_factory=Counter)
    waiting: dict[TapKey, deque[_Waiting]] = field(default_factory=dict)
    nbytes: int = 0
    taken: int = 0
    gap: int = 0
    ended: bool = False

    def next(self) -> LoggedMessage | None:
        """Returns the next message; None at the end or at a gap."""
        item = next(self.items, None)
        if item is None:
            self.ended = True
        elif isinstance(item, Gap):
            self.gap = item.messages
        else:
            self.taken += 1
            return item
        return None

    def add(self, key: TapKey, waiting: _Waiting) -> None:
        self.waiting.setdefault(key, deque()).append(waiting)
        self.nbytes += waiting.nbytes

    def oldest(self) -> TapKey | None:
        """The tap whose message has waited longest; None if none waits."""
        return min(self.waiting, key=lambda key: self.waiting[key][0].position, default=None)

    def pop(self, key: TapKey) -> _Waiting:
        queue = self.waiting[key]
        found = queue.popleft()
        if not queue:
            del self.waiting[key]
        self.nbytes -= found.nbytes
        return found


class Pairing:
    """Pairs the messages of a device in two logs.

    Attributes:
        passed_over: number of messages whose counterpart is missing or was folded.
        gaps: grows with each gap that was passed.
    """

    def __init__(
        self,
        a: Iterator[LoggedMessage | Gap],
        b: Iterator[LoggedMessage | Gap],
        key_of: Callable[[LoggedMessage], TapKey],
        a_lacks: Callable[[TapKey], bool],
        b_lacks: Callable[[TapKey], bool],
    ) -> None:
        """Takes a device's messages in each log, the function that identifies a tap, and whether a log lacks a tap."""
        self._a, self._b = _Side(a, a_lacks), _Side(b, b_lacks)
        self._key_of = key_of
        self._matched = -1.0
        self._check = False
        self.passed_over = 0
        self.gaps = 0

    def is_settled(self, position: float) -> bool:
        """Whether all messages before a position in the first log, which was yielded, have been paired or reported."""
        oldest = self._a.oldest()
        return oldest is None or self._a.waiting[oldest][0].position >= position

    def __iter__(self) -> Iterator[Pair | Single | Unaligned]:
        """Yields results in the order in which counterparts are found: nearly the first log's."""
        a, b = self._a, self._b
        while not (a.ended and b.ended):
            if a.gap or b.gap:
                yield from self._through_gap()
                continue
            if self._check:
                self._check = False
                unaligned = yield from self._checked()
                if unaligned:
                    return
                continue
            side = b if a.ended or (not b.ended and b.nbytes < a.nbytes) else a
            logged = side.next()
            if logged is not None:
                yield from self._take(side, logged)
        for side in (a, b):
            yield from self._give_up(side, b if side is a else a)

    def _take(self, side: _Side, logged: LoggedMessage) -> Iterator[Pair | Single]:
        other = self._b if side is self._a else self._a
        key = self._key_of(logged)
        occurrence = side.counts[key] + logged.folded
        side.counts[key] = occurrence + 1
        while key in other.waiting and other.waiting[key][0].occurrence < occurrence:
            other.pop(key)  # its counterpart was folded in this log
            self.passed_over += 1
        mine = _Waiting(occurrence, side.taken - 1, logged)
        if key in other.waiting and other.waiting[key][0].occurrence == occurrence:
            theirs = other.pop(key)
            first, second = (mine, theirs) if side is self._a else (theirs, mine)
            self._matched = max(self._matched, first.position)
            yield Pair(first.position, first.logged, second.logged)
        elif other.counts[key] > occurrence:
            self.passed_over += 1
        elif other.lacks(key):
            yield self._single(side, mine, "the other log has no such tap")
        elif other.ended:
            yield self._single(side, mine, _no_more(other, key))
        else:
            side.add(key, mine)
            while side.nbytes > PENDING_BYTES:
                oldest = side.oldest()
                assert oldest is not None
                reason = f"the other log does not have it within {PENDING_BYTES >> 20} MiB of messages"
                yield self._single(side, side.pop(oldest), reason)

    def _single(self, side: _Side, waiting: _Waiting, reason: str) -> Single:
        if side is self._a:
            return Single(waiting.position, True, waiting.logged, reason)
        return Single(self._matched + 0.5, False, waiting.logged, reason)

    def _give_up(self, side: _Side, other: _Side) -> Iterator[Single]:
        while (oldest := side.oldest()) is not None:
            yield self._single(side, side.pop(oldest), _no_more(other, oldest))

    def _through_gap(self) -> Iterator[Pair | Single]:
        # Everything before the gap must be paired first: then the next messages of the other log are the missing ones.
        a, b = self._a, self._b
        if a.gap and b.gap:
            for gap, other in ((a, b), (b, a)):
                oldest = other.oldest()
                if oldest is not None:  # its counterpart is among the missing messages
                    self._pass_over(gap, oldest, other.pop(oldest).logged)
                    return
            both = min(a.gap, b.gap)
            a.gap -= both
            b.gap -= both
            self.gaps += 1
            self._check = not (a.gap or b.gap)
            return
        side, other = (a, b) if a.gap else (b, a)
        if side.waiting:
            if other.ended:
                yield from self._give_up(side, other)
            elif (logged := other.next()) is not None:
                yield from self._take(other, logged)
            return
        oldest = other.oldest()
        if oldest is not None:
            self._pass_over(side, oldest, other.pop(oldest).logged)
        elif other.ended:
            side.gap = 0
        elif (logged := other.next()) is not None:
            key = self._key_of(logged)
            other.counts[key] += 1 + logged.folded
            self._pass_over(side, key, logged)
        self._check = not side.gap and not other.gap

    def _pass_over(self, side: _Side, key: TapKey, logged: LoggedMessage) -> None:
        count = 1 + logged.folded
        side.counts[key] += count
        side.gap = max(0, side.gap - count)
        self.gaps += 1
        self.passed_over += 1

    def _checked(self) -> Generator[Pair | Single | Unaligned, None, bool]:
        # After a gap, the next messages of both logs must be of one tap; otherwise the gap's length was wrong.
        a, b = self._a, self._b
        if a.waiting or b.waiting:
            return False
        first = a.next()
        if first is None:
            self._check = bool(a.gap)
            return False
        second = b.next()
        if second is not None and self._key_of(first) != self._key_of(second):
            yield Unaligned(first, second)
            return True
        yield from self._take(a, first)
        if second is not None:
            yield from self._take(b, second)
        return False


def _no_more(other: _Side, key: TapKey) -> str:
    count = other.counts[key]
    return (
        f"the other log has {count:,} message(s) of this tap"
        if count
        else "the other log has none of this tap"
    )
