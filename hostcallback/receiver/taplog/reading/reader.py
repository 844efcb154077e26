"""Reads logs: the selected messages of all their processes by time, each once, also if several logs have it."""

from __future__ import annotations

import bisect
import copy
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver import errors
from hostcallback.receiver.files import paths_of
from hostcallback.receiver.log import logger
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.layout import Damage, ThinnedTap
from hostcallback.receiver.taplog.reading import chunk_reader, logged_message, merge
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote, Order, Record
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.taplog.reading.selection import LoggedRun, RunCatalog, Selection
from hostcallback.receiver.wire.array_types import Array

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

EVERYTHING = Selection()
Watch = Callable[[Selection, Iterator[Record]], Iterator[Record]]


LISTED_AGAIN = 5
"""How often a folder is listed whose writer deletes all segments before they are opened."""


class LogReader:
    """Reads the logs in some folders or files. May be iterated any number of times, by one thread each.

    Of a folder with several runs it reads the last one, unless it is told otherwise; segments that are given by their
    own paths are all read.

    Attributes:
        runs: the runs in the given folders and files, the last one last, also those that are not read.
        strays: files of the folders that are called like segments and are none.
        writers: the processes that wrote the logs, in the order of their start.
        watch: what `message_runs` reads goes through it, such as a counter for a progress bar; None for nothing.

    Example:
        for message in receiver.LogReader("run/taps").messages():
            print(message.message.seq, message.message.arrays)
    """

    def __init__(self, paths: Paths, *, run: str | None = None) -> None:
        """Opens the logs and reads the headers of their segments.

        Args:
            paths: one or several folders with logs, or segments.
            run: the name of a run, a pattern of names, or "all"; None for the last run of each folder.

        Raises:
            TypeError: something else than paths is given.
            NotATapLogError: a path is not a log.
            NoSuchRunError: no run has that name.
            UnsupportedVersionError: a segment's writer was newer.
            OSError: a path does not exist, or cannot be read.
        """
        given = paths_of(paths, "the folder of a tap log, which record= wrote, or several")
        files = [Path(item) for item in given]
        self.strays: list[Path] = []
        self.watch: Watch | None = None
        self._cut_off: list[Path] = []
        self._copies = SequenceDeduplicator()
        self._catalog = RunCatalog()
        self._began: dict[Writer, int] = {}  # when each process began its first segment that is there
        self._problem: Exception = errors.NotATapLogError("no tap log was given")
        known: dict[Path, Writer] = {}
        chosen: dict[Path, None] = {}
        for item in given:
            for _ in range(LISTED_AGAIN):
                in_item = {
                    path: known.get(path) or self._note(path, files) for path in layout.segments_of(item)
                }
                found = {path: writer for path, writer in in_item.items() if writer is not None}
                if found or all(path.exists() for path in in_item):
                    break  # otherwise all that were listed have been deleted since, and there are others
            known |= found
            if run is None and found and Path(item).is_dir():
                last = self._catalog.newest({writer.run for writer in found.values()})
                found = {path: writer for path, writer in found.items() if writer.run == last}
            chosen |= dict.fromkeys(found)
        if not known:
            raise self._problem
        if self.strays:
            logger.warning("left out, because no tap logs: %s", ", ".join(map(str, self.strays)))
        wanted = None if run is None else self._catalog.chosen(run)
        segments: dict[Writer, list[Path]] = {}
        for path in chosen:
            if wanted is None or known[path].run in wanted:
                segments.setdefault(known[path], []).append(path)
        self._processes = [
            (writer, sorted(segments[writer], key=lambda path: path.name))
            for writer in sorted(segments, key=lambda writer: self._began[writer])
        ]

    def _note(self, path: Path, given: Sequence[Path]) -> Writer | None:
        # Returns the writer of a segment; None if the file is none yet or was deleted.
        try:
            segment = SegmentReader(path)
        except errors.CutOffLogError as error:
            self._cut_off.append(path)
            self._problem = error
        except FileNotFoundError as error:  # its writer deletes old segments
            self._problem = error
        except errors.NotATapLogError as error:
            if path in given:
                raise
            self.strays.append(path)
            self._problem = error
        else:
            self._copies.note(segment.writer, segment.info, path)
            found = segment.info.get("created_ns")
            created_ns = found if type(found) is int else 0
            self._catalog.add(segment.writer.run, segment.writer.process, created_ns)
            self._began[segment.writer] = min(created_ns, self._began.get(segment.writer, created_ns))
            segment.close()
            return segment.writer
        return None

    @property
    def runs(self) -> list[LoggedRun]:
        """The runs in the given folders and files, the last one last, also those that are not read."""
        return self._catalog.runs

    @property
    def writers(self) -> list[Writer]:
        """The processes that wrote the logs, in the order of their start."""
        return [writer for writer, _ in self._processes]

    def is_alone(self, writer: Writer) -> bool:
        """Whether no other process of the program run of that process is in the logs."""
        return logged_message.is_alone(writer, self.writers)

    def segments(self) -> Iterator[tuple[Writer, SegmentReader]]:
        """The segments of each process in order. Each one is open until the next one is taken."""
        for writer, paths in self._processes:
            for path in paths:
                try:
                    segment = SegmentReader(path)
                except FileNotFoundError:  # its writer deletes old segments
                    continue
                yield writer, segment
                segment.close()

    def of(self, writer: Writer) -> LogReader:
        """A reader of one process's segments."""
        reader = copy.copy(self)
        reader._processes = [item for item in self._processes if item[0] == writer]
        reader._cut_off = []
        return reader

    def thinned(self) -> dict[str, ThinnedTap]:
        """The taps that rules thin out, or thinned out, by name: all rules, and the number of suppressed messages."""
        rules: dict[str, dict[str, None]] = {}
        last: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for _, segment in self.segments():
            for chunk in segment.chunks():
                noted = (
                    segment.rules_in(chunk)
                    if isinstance(chunk, chunk_reader.Chunk) and chunk.kind is layout.Kind.RULES
                    else []
                )
                for tap in [] if isinstance(noted, Damage) else noted:
                    rules.setdefault(tap.name, {})[tap.rules] = None
                    last[tap.name] = tap.rules
                    counts[tap.name] += tap.suppressed
        return {
            name: ThinnedTap(name, "; ".join(filter(None, rules[name])), counts[name])
            for name in sorted(rules)
            if last[name] or counts[name]
        }

    def exceptions(self) -> dict[Writer, Any]:
        """What each process noted last of the exceptions of its tap functions: plain data that the caller checks."""
        found: dict[Writer, Any] = {}
        for writer, segment in self.segments():
            for chunk in segment.chunks():
                if isinstance(chunk, chunk_reader.Chunk) and chunk.kind is layout.Kind.EXCEPTIONS:
                    noted = segment.exceptions_in(chunk)
                    if not isinstance(noted, Damage):
                        found[writer] = noted
        return found

    def devices(self, selection: Selection = EVERYTHING) -> list[tuple[Writer, str]]:
        """The devices of each process that recorded messages. Reads the headers of all segments."""
        found: dict[tuple[Writer, str], None] = {}
        for writer, segment in self.segments():
            for chunk in segment.chunks():
                if isinstance(chunk, chunk_reader.Chunk) and chunk.kind is layout.Kind.FRAMES:
                    found[writer, segment.devices.get(chunk.stream, "")] = None
        return [key for key in found if selection.wants_device(key[1])]

    def tap_names(self) -> set[str]:
        """Names of the taps that the logs describe. (Exported programs' taps are described in their messages only.)"""
        names: set[str] = set()
        for _, segment in self.segments():
            for _ in segment.chunks():
                pass  # reading the chunks collects the descriptors
            names |= {described.name for _, described in segment.consumers.values()}
        return names

    def message_runs(
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
        records = self._copies.once(merge.merged(self._processes, selection, by_time=by_time, order=order))
        yield from records if self.watch is None else self.watch(selection, records)

    def values(self, selection: Selection = EVERYTHING) -> Iterator[LoggedMessage | LostNote | Damage]:
        """Yields as `records` does, but assembles the shards of programs of several processes: a value is one message.

        Shards of incomplete values come late, one by one. If only some devices are selected, all shards come one by
        one.
        """
        if selection.devices:
            yield from self.records(selection)
            return
        wholes = logged_message.ShardMerger(shows_incomplete=True, is_alone=self.is_alone)
        for record in self.records(selection, order=wholes.jobs):
            if isinstance(record, LoggedMessage):
                yield from wholes.take(record)
            else:
                yield record
        yield from wholes.finish()

    def records(
        self, selection: Selection = EVERYTHING, *, order: Order | None = None
    ) -> Iterator[LoggedMessage | LostNote | Damage]:
        """Yields messages, with notes of lost messages and damage in their places; `order`: see `message_runs`."""
        decoder = logged_message.MessageDecoder()
        for record in self.message_runs(selection, order=order):
            if not isinstance(record, merge.Stretch):
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
            raise errors.DamagedLogError(f"{damaged[0]}{more}")


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
            stream = (
                self._streams.get(record.writer, "") if isinstance(record, merge.Stretch | LostNote) else ""
            )
            if stream not in self._copied:
                yield record
            elif isinstance(record, LostNote):
                if (stream, record.lost) not in notes:
                    notes.add((stream, record.lost))
                    yield record
            elif isinstance(record, merge.Stretch):
                seqs = record.block.seqs[record.start : record.stop]
                new = seen[stream, record.device].add(seqs)
                if new.all():
                    yield record
                elif new.any():
                    block = record.block.part(record.start, record.stop).chosen(new)
                    steps = record.steps[record.start : record.stop][new]
                    yield record._replace(block=block, steps=steps, start=0, stop=len(block))
