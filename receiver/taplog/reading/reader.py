"""Reads logs: the selected messages of all their processes and segments, merged by time."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hostcallback.receiver.taplog.format.errors import (
    CutOffLogError,
    Damage,
    DamagedLogError,
    NotATapLogError,
)
from hostcallback.receiver.taplog.format.layout import Kind
from hostcallback.receiver.taplog.format.segment_name import segments_of
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.dedup import SequenceDeduplicator
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, RunDecoder
from hostcallback.receiver.taplog.reading.merge import LostRun, MessageRun, Order, Record, merged
from hostcallback.receiver.taplog.reading.process_groups import is_alone
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.reading.shard_assembly import ShardMerger

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

EVERYTHING = Selection()


class LogReader:
    """Reads the logs in some folders or files. May be iterated any number of times, by one thread each.

    Attributes:
        writers: the processes that wrote the logs, in the order of their start.
    """

    def __init__(self, paths: Paths) -> None:
        """Opens the logs and reads the headers of their segments.

        Args:
            paths: one or several folders with logs, or segments.

        Raises:
            NotATapLogError: a path is not a log.
            UnsupportedVersionError: a segment's writer was newer.
            OSError: a path does not exist, or cannot be read.
        """
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        found: dict[Writer, list[Path]] = {}
        self._cut_off: list[Path] = []
        self._copies = SequenceDeduplicator()
        problem: Exception = NotATapLogError("no tap log was given")
        for path in dict.fromkeys(segment for item in given for segment in segments_of(item)):
            try:
                segment = SegmentReader(path)
            except CutOffLogError as error:
                self._cut_off.append(path)
                problem = error
            except FileNotFoundError as error:  # its writer deletes old segments
                problem = error
            else:
                found.setdefault(segment.writer, []).append(path)
                self._copies.note(segment.writer, segment.info, path)
                segment.close()
        if not found:
            raise problem
        self._processes = [
            (writer, sorted(segments, key=lambda path: path.name)) for writer, segments in found.items()
        ]

    @property
    def writers(self) -> list[Writer]:
        """The processes that wrote the logs, in the order of their start."""
        return [writer for writer, _ in self._processes]

    def is_alone(self, writer: Writer) -> bool:
        """Whether no other process of the program run of that process is in the logs."""
        return is_alone(writer, self.writers)

    def segments(self) -> Iterator[tuple[Writer, SegmentReader]]:
        """The segments of each process in order. Each one is open until the next one is taken."""
        for writer, paths in self._processes:
            for path in paths:
                segment = SegmentReader(path)
                yield writer, segment
                segment.close()

    def of(self, writer: Writer) -> LogReader:
        """A reader of one process's segments."""
        reader = copy.copy(self)
        reader._processes = [item for item in self._processes if item[0] == writer]
        reader._cut_off = []
        return reader

    def devices(self, selection: Selection = EVERYTHING) -> list[tuple[Writer, str]]:
        """The devices of each process that recorded messages. Reads the headers of all segments."""
        found: dict[tuple[Writer, str], None] = {}
        for writer, segment in self.segments():
            for chunk in segment.chunks():
                if isinstance(chunk, Chunk) and chunk.kind is Kind.FRAMES:
                    found[writer, segment.devices.get(chunk.stream, "")] = None
        return [key for key in found if selection.wants_device(key[1])]

    def tap_names(self) -> set[str]:
        """Names of the taps that the logs describe. (Exported programs' taps are described in their messages only.)"""
        names: set[str] = set()
        for path in (path for _, paths in self._processes for path in paths):
            segment = SegmentReader(path)
            for _ in segment.chunks():
                pass  # reading the chunks collects the descriptors
            names |= {described.name for _, described in segment.consumers.values()}
            segment.close()
        return names

    def runs(
        self, selection: Selection = EVERYTHING, *, by_time: bool = True, order: Order | None = None
    ) -> Iterator[Record]:
        """Yields recorded messages in runs of one device, notes of lost messages, and damage.

        A message that is in several of the logs, as in those of several collectors, is yielded once. Messages of
        exported programs are yielded regardless of their names, because only decoding shows these.

        Args:
            selection: which messages are wanted.
            by_time: whether messages of all devices are in order of time; otherwise only each device's are.
            order: further conditions for the order of processes.
        """
        for path in self._cut_off:
            yield Damage(path, 0, path.stat().st_size, 0, "ends in its header", torn=True)
        yield from self._copies.once(merged(self._processes, selection, by_time=by_time, order=order))

    def values(self, selection: Selection = EVERYTHING) -> Iterator[LoggedMessage | LostRun | Damage]:
        """Yields as `records` does, but assembles the shards of programs of several processes: a value is one message.

        Shards of incomplete values come late, one by one. If only some devices are selected, all shards come one by
        one.
        """
        if selection.devices:
            yield from self.records(selection)
            return
        wholes = ShardMerger(shows_incomplete=True, is_alone=self.is_alone)
        for record in self.records(selection, order=wholes.jobs):
            if isinstance(record, LoggedMessage):
                yield from wholes.take(record)
            else:
                yield record
        yield from wholes.finish()

    def records(
        self, selection: Selection = EVERYTHING, *, order: Order | None = None
    ) -> Iterator[LoggedMessage | LostRun | Damage]:
        """Yields messages, with notes of lost messages and damage in their places; `order`: see `runs`."""
        decoder = RunDecoder()
        for record in self.runs(selection, order=order):
            if not isinstance(record, MessageRun):
                yield record
                continue
            for message in decoder.messages(record):
                if isinstance(message, Damage) or selection.wants_name(message.message.consumer.name):
                    yield message

    def messages(self, selection: Selection = EVERYTHING) -> Iterator[LoggedMessage]:
        """Yields messages: those of a process by time, those of a device in the order of their emission.

        Raises:
            DamagedLogError: after the last message, if parts of the log are damaged and their messages missing. An
            incomplete
                message at the end, as a killed process leaves it, is not damage.
        """
        damaged: list[Damage] = []
        for record in self.records(selection):
            if isinstance(record, LoggedMessage):
                yield record
            elif isinstance(record, Damage) and not record.torn:
                damaged.append(record)
        if damaged:
            more = f" (and {len(damaged) - 1} more damaged parts)" if len(damaged) > 1 else ""
            raise DamagedLogError(f"{damaged[0]}{more}")
