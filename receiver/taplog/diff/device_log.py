"""The messages of one device in a log, with the gaps where messages are missing."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from typing import NamedTuple

from hostcallback.receiver.taplog.format.errors import Damage, Lost
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader, Paths
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.taplog.reading.selection import Selection

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
    """

    def __init__(self, path: Paths, *, ignore_lines: bool, run: str | None = None) -> None:
        """Scans the log.

        Args:
            path: a folder with a log, a segment, or several of them.
            ignore_lines: taps of one name are one tap, even if their source lines differ.
            run: see `LogReader`.

        Raises:
            TapLogError: it is not a tap log.
            OSError: it cannot be read.
        """
        self.reader = LogReader(path, run=run)
        self._ignore_lines = ignore_lines
        self.devices: set[DeviceKey] = set()
        self.damaged: list[Damage] = []
        self._lost: dict[tuple[Writer, str], list[Lost]] = {}
        self._keys: set[TapKey] = set()
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
            if _number(writer) == key.process:
                yield from self._of_writer(writer, key.device)

    def _of_writer(self, writer: Writer, device: str) -> Iterator[LoggedMessage | Gap]:
        lost = self._lost.get((writer, device), [])
        seq = -1
        damaged = 0  # messages in damaged parts that no gap in the numbers has shown yet
        for record in self.reader.of(writer).records(Selection(devices=(glob.escape(device),))):
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

    def _scan(self, writer: Writer, segment: SegmentReader) -> None:
        for chunk in segment.chunks():
            if not isinstance(chunk, Chunk):
                self._all_described = False
            elif chunk.kind is Kind.FRAMES:
                self.devices.add(DeviceKey(_number(writer), segment.devices.get(chunk.stream, "")))
                # The messages of exported programs name their taps themselves, so any tap may be among them.
                self._all_described &= chunk.consumers != ALL_CONSUMERS
            elif chunk.kind is Kind.LOST:
                lost = segment.lost_in(chunk)
                if isinstance(lost, Lost):
                    self._lost.setdefault((writer, lost.device), []).append(lost)
        for _, described in segment.consumers.values():
            self._keys.add(self._key(described.name, described.source_line, described.transforms))

    def _key(self, name: str, source_line: str, transforms: object) -> TapKey:
        return name, "" if self._ignore_lines else source_line, repr(transforms)


def _number(writer: Writer) -> int:
    return writer.process_index or 0


def _missing(lost: list[Lost], first: int, stop: int) -> int:
    # Number of sequence numbers in [first, stop) that were lost. Other missing numbers are not messages, but ends of
    # receivers' scopes.
    ranges = ((note.first_seq, max(note.last_seq + 1, note.first_seq + note.messages)) for note in lost)
    count = sum(max(0, min(end, stop) - max(start, first)) for start, end in ranges)
    return min(count, max(0, stop - first))
