"""Follows growing logs: new messages, poll by poll, in existing segments and in new ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hostcallback.receiver import errors
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.reading import chunk_reader, logged_message, merge, segment_reader
from hostcallback.receiver.taplog.reading.selection import LoggedRun, RunCatalog, Selection, is_run as matches
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

AT_ONCE = 64
"""Number of chunks that are decoded and sorted by time together."""

Found = logged_message.LoggedMessage | merge.LostNote | layout.Damage


@dataclass(slots=True)
class _Followed:
    # A segment, and the end of its part that has been read.
    reader: segment_reader.SegmentReader
    offset: int = 0
    folded: dict[int, dict[int, int]] = field(default_factory=dict)  # by stream


class Follower:
    """Reads the logs in some folders or files as they grow. One thread.

    Attributes:
        writers: the processes whose segments were found.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        selection: Selection,
        *,
        wait: bool,
        shards: bool = False,
        run: str | None = None,
    ) -> None:
        """Opens the existing segments.

        Args:
            paths: folders and segments.
            selection: which messages are wanted.
            wait: whether a folder may still have no segments.
            shards: whether shards of programs of several processes are shown one by one.
            run: the name of a run, a pattern of names, or "all"; None for the last run of each folder, and for runs
                that begin later.

        Raises:
            NotATapLogError: a path is not a log.
            NoSuchRunError: no run has that name, and `wait` is false.
            UnsupportedVersionError: a segment's writer was newer.
            OSError: a path does not exist, or cannot be read.
        """
        self._paths = [Path(path) for path in paths]
        self._selection = selection
        self._wait = wait
        self._followed: dict[Path, _Followed | None] = {}
        self._decoder = logged_message.MessageDecoder()
        self._wholes = None if shards or selection.devices else self._merger()
        self._described: dict[segment_reader.Writer, tuple[dict[int, TapDescriptor], StepFinder]] = {}
        self.writers: set[segment_reader.Writer] = set()
        self._refused: list[layout.Damage] = []
        self._run = run
        self._catalog = RunCatalog()
        self._look(first=True)
        self._choose_run()
        if not self._followed and not wait:
            raise errors.NotATapLogError(f"{self._paths[0]}: this tap log ends before its header does")

    @property
    def runs(self) -> list[LoggedRun]:
        """The runs in the folders, the last one last, also those that are not followed."""
        return self._catalog.runs

    def _merger(self) -> logged_message.ShardMerger:
        return logged_message.ShardMerger(
            shows_incomplete=False, is_alone=lambda writer: logged_message.is_alone(writer, self.writers)
        )

    def last(self, count: int) -> list[Found]:
        """Returns the last messages so far, of all devices together; `poll` then continues after them.

        Shards of incomplete values are left out.
        """
        chunks = list(self._new_chunks())
        whole = [item for item in chunks if not isinstance(item, layout.Damage)]
        self._decoded([item for item in whole if item[1].kind is layout.Kind.FOLDED])
        messages = [item for item in whole if item[1].kind is layout.Kind.FRAMES]
        messages.sort(key=lambda item: item[1].max_time_ns, reverse=True)
        kept: list[Found] = []
        found: list[Found] = []
        taken, wanted = 0, count
        while taken < len(messages) and len(found) < count:
            # Other chunks may contain messages of the time of this chunk, so all that reach into it are decoded too.
            start = taken
            total = 0
            while taken < len(messages) and total < wanted:
                total += messages[taken][1].messages
                taken += 1
            begins = min((chunk.min_time_ns for _, chunk in messages[start:taken]), default=0)
            while taken < len(messages) and messages[taken][1].max_time_ns >= begins:
                taken += 1
            kept += self._decoded(messages[start:taken][::-1])
            wanted *= 4
            found = self._together_anew(kept)
        damaged = [item for item in chunks if isinstance(item, layout.Damage)]
        return [*damaged, *(found[-count:] if count else [])]

    def poll(self) -> Iterator[Found]:
        """Yields the records that came since the last poll, sorted by time in portions."""
        self._look(first=False)
        yield from self._refused
        self._refused.clear()
        portion: list[tuple[_Followed, chunk_reader.Chunk]] = []
        for item in self._new_chunks():
            if isinstance(item, layout.Damage):
                yield item
                continue
            portion.append(item)
            if len(portion) == AT_ONCE:
                yield from self._together(_by_time(self._decoded(portion)))
                portion.clear()
        yield from self._together(_by_time(self._decoded(portion)))

    def _together_anew(self, found: list[Found]) -> list[Found]:
        # Starts with a new merger, because values that began before these messages lack shards.
        if self._wholes is not None:
            self._wholes = self._merger()
        return list(self._together(_by_time(found)))

    def _together(self, found: list[Found]) -> Iterator[Found]:
        wholes = self._wholes
        for item in found:
            if wholes is None or not isinstance(item, logged_message.LoggedMessage):
                yield item
                continue
            yield from wholes.take(item)
            while wholes.jobs.is_paused(item.writer, 1):  # show messages as they come: wait for no process
                wholes.jobs.evict_oldest()
                yield from wholes.found()

    def _look(self, *, first: bool) -> None:
        for given in self._paths:
            try:
                found = layout.segments_of(given)
            except errors.NotATapLogError:
                if not self._wait:
                    raise
                continue
            except OSError:
                if first:
                    raise
                continue  # the path was deleted
            for path in found:
                if path not in self._followed:
                    self._open(path, first=first)

    def _open(self, path: Path, *, first: bool) -> None:
        try:
            reader = segment_reader.SegmentReader(path)
        except errors.CutOffLogError:
            return  # the segment is being created; the next look finds it complete
        except (errors.NotATapLogError, OSError) as error:
            if first:
                raise
            self._followed[path] = None
            self._refused.append(layout.Damage(path, 0, 0, -1, str(error)))
            return
        self._catalog.add(reader.writer.run, reader.writer.process, reader.info.get("created_ns"))
        is_wanted = self._run is None or matches(reader.writer.run, self._run)
        self._followed[path] = _Followed(reader) if is_wanted else None
        if is_wanted:
            self.writers.add(reader.writer)

    def _choose_run(self) -> None:
        # Called once, for the segments that exist at first. Those that follow belong to the last run or to later ones.
        if self._run is not None:
            if self._followed and not self._wait:
                self._catalog.chosen(self._run)
            return
        by_folder: dict[Path, set[str]] = {}
        for path, followed in self._followed.items():
            if followed is not None and path not in self._paths:
                by_folder.setdefault(path.parent, set()).add(followed.reader.writer.run)
        last = {folder: self._catalog.newest(runs) for folder, runs in by_folder.items()}
        for path, followed in self._followed.items():
            if followed is not None and followed.reader.writer.run != last.get(
                path.parent, followed.reader.writer.run
            ):
                self._followed[path] = None
        self.writers = {
            followed.reader.writer for followed in self._followed.values() if followed is not None
        }

    def _new_chunks(self) -> Iterator[tuple[_Followed, chunk_reader.Chunk] | layout.Damage]:
        for path, followed in list(self._followed.items()):
            if followed is None:
                continue
            reader = followed.reader
            closed = reader.is_closed()
            for item in reader.chunks(followed.offset):
                if isinstance(item, layout.Damage):
                    if item.torn:
                        break
                    followed.offset = item.offset + item.nbytes
                    yield item
                elif item.is_torn:
                    break
                else:
                    followed.offset = item.end
                    yield followed, item
            if closed:  # the segment is complete
                self._followed[path] = None

    def _decoded(self, chunks: Sequence[tuple[_Followed, chunk_reader.Chunk]]) -> list[Found]:
        found: list[Found] = []
        for followed, chunk in chunks:
            reader = followed.reader
            if chunk.kind in merge.NOTES:
                found += merge.read_note(reader, chunk, followed.folded.setdefault(chunk.stream, {}))
            elif chunk.kind is layout.Kind.FRAMES:
                found += self._messages(followed, chunk)
        return found

    def _messages(self, followed: _Followed, chunk: chunk_reader.Chunk) -> list[Found]:
        reader, selection = followed.reader, self._selection
        device = reader.devices.get(chunk.stream, "")
        wanted = {number: selection.wants_name(tap.name) for number, tap in reader.consumers.values()}
        if not (
            selection.wants_device(device)
            and selection.wants_chunk(chunk, wanted)
            and selection.wants_steps(chunk)
        ):
            return []
        block, damage = chunk_reader.read_frames(reader, chunk)
        found: list[Found] = [] if damage is None else [damage]
        if not len(block):
            return found
        described, finder = self._known(reader)
        steps = finder.as_they_come(device, block, chunk.step_before)
        mask = selection.choose(block, steps)
        folded = followed.folded.get(chunk.stream, {})
        block = block.chosen(mask)
        run = merge.Stretch(
            reader.writer,
            device,
            block,
            steps[np.flatnonzero(mask)],
            0,
            len(block),
            folded,
            described,
            reader.path,
        )
        found += [
            message
            for message in self._decoder.messages(run)
            if isinstance(message, layout.Damage) or selection.wants_name(message.message.consumer.name)
        ]
        return found

    def _known(self, reader: segment_reader.SegmentReader) -> tuple[dict[int, TapDescriptor], StepFinder]:
        if reader.writer not in self._described:
            described: dict[int, TapDescriptor] = {}
            self._described[reader.writer] = described, StepFinder(described)
        known = self._described[reader.writer]
        for consumer_id, (_, item) in reader.consumers.items():
            known[0].setdefault(consumer_id, item)
        return known


def _by_time(found: list[Found]) -> list[Found]:
    def time_of(item: Found) -> int:
        if isinstance(item, logged_message.LoggedMessage):
            return item.message.time_ns
        return item.lost.time_ns if isinstance(item, merge.LostNote) else 0

    return sorted(found, key=time_of)
