"""Reads a stored stream as it grows: the messages of complete chunks, and the notes of lost ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.errors import NotATapLogError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.taplog.format.layout import Damage, Kind
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.merge import NOTES, Record, Stretch, read_note
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

_UNKNOWN = 1 << 63
"""Set in the bits of chunks that contain messages of undescribed taps; such chunks have all bits set."""


@dataclass(frozen=True, slots=True)
class Again:
    """Messages that were read before, and must be read again.

    Attributes:
        since: position before the first of them.
        seqs: their sequence numbers, by device.
    """

    since: StreamOffset
    seqs: Mapping[str, Collection[int]]


def end_of_chunk(path: Path, offset: int) -> tuple[int, int]:
    """The end of the first chunk of messages or notes from `offset` on, and its number of messages.

    Reads nothing but headers of chunks. If there is no such chunk, the end is that of the file.
    """
    reader = SegmentReader(path)
    for item in reader.headers(offset):
        if isinstance(item, Damage):
            return item.offset + item.nbytes, 0
        if item.kind is not Kind.DESCRIPTIONS:
            return item.end, item.messages
    return reader.nbytes, 0


def next_segment(path_of: Callable[[int], Path], number: int, last: int) -> int:
    """The number of the next stored segment after `number`; `last` if there is none before it.

    A sender may leave out any numbers, so their gaps are not walked through.
    """
    number += 1
    if number >= last or path_of(number).exists():
        return min(number, last)
    first = path_of(0)
    start = first.name[: -len(f"000000{first.suffix}")]
    with contextlib.suppress(OSError):
        for name in os.listdir(first.parent):
            digits = name[len(start) : -len(first.suffix)]
            if (
                name.startswith(start)
                and name.endswith(first.suffix)
                and digits.isdecimal()
                and len(digits) == 6
            ):
                found = int(digits)
                if number <= found < last:
                    last = found
    return last


class StoredRuns:
    """Reads the message runs of one stored stream. One thread.

    Attributes:
        position: end of the part that has been read.
        done: messages of the chunk after it that the caller has done with. They are left out when it is read again.
        local_devices: indices of devices among their process's own, by name, as far as they are known.
    """

    def __init__(
        self,
        path_of: Callable[[int], Path],
        position: StreamOffset,
        wants: Callable[[TapDescriptor], bool],
        again: Again | None = None,
        *,
        done: int = 0,
        on_chunk: Callable[[StreamOffset], None] = lambda position: None,
    ) -> None:
        """Continues at `position`.

        Args:
            path_of: returns the path of a segment.
            position: where to start.
            wants: whether messages of a tap are wanted. Chunks without such messages are skipped.
            again: messages before `position` that are read first.
            done: messages after `position` that are left out.
            on_chunk: called with the position of each chunk before anything of it is read.
        """
        self._again, self._again_until = again, position
        self._wants = wants
        self._wanted = 0, 0  # number of consumers seen in the segment, and the bits of the wanted ones
        self.position = position if again is None else again.since
        self.done = done
        self._on_chunk = on_chunk
        self._writer: Writer | None = None
        self._devices: set[str] = set()
        self.local_devices: dict[str, int] = {}
        self._path_of = path_of
        self._reader: SegmentReader | None = None
        self._number = 0
        self._described: dict[int, TapDescriptor] = {}
        self._is_full = False
        self._chunk_end = StreamOffset(0, 0)
        self._steps = StepFinder(self._described)
        self._folded: dict[int, dict[int, int]] = {}

    @property
    def described(self) -> int:
        """Number of descriptions that it keeps."""
        return len(self._described) + (0 if self._reader is None else len(self._reader.consumers))

    def process_label(self, key: StreamKey, *, alone: bool) -> str:
        """Names the process: `p3` by its index, or `host:pid` if it has none and the run has others without one.

        Args:
            key: of the stream.
            alone: whether no other stream of the run has this process number.
        """
        writer = self._writer
        if alone or writer is None or writer.process_index is not None:
            return f"p{key.process}"
        return f"{writer.host}:{writer.pid}"

    def read(
        self, stored: StreamOffset, limit_bytes: float, is_enough: Callable[[], bool] = lambda: False
    ) -> Iterator[Record]:
        """Yields the new records up to `stored`, about `limit_bytes`; then `position` is the end of the read part.

        While a record is yielded, `position` is where reading must start to yield it again. `is_enough` is asked
        after each chunk, and ends the reading.
        """
        left = limit_bytes
        while self.position < stored and left > 0:
            at = self.position
            for record, nbytes in self._read_segment(stored):
                left -= nbytes  # counted at the end of a chunk, so a chunk is never left half yielded by the limit
                if record is not None:
                    yield record
                if left <= 0 or (record is None and is_enough()):
                    return
            if self.position.segment < stored.segment:
                # The rest of the segment, if there is any, was never sent.
                self.position = self._next(stored)
            elif self.position == at:  # the rest of the last segment is not a whole chunk yet
                return

    def read_again_of_done(self) -> Iterator[Record]:
        """Yields those of the first `done` messages after `position` that must be read again; all are in one chunk.

        To be called when everything before `position` has been read. `position` and `done` do not change.
        """
        if self._again is None or not self.done:
            return
        number, offset = self.position
        with contextlib.suppress(NotATapLogError, OSError):  # `read` reports them
            reader = SegmentReader(self._path_of(number))
            for item in reader.chunks(0):
                if isinstance(item, Damage) or item.end <= offset:
                    continue
                self._know(reader)
                for record in self._records(reader, item):
                    chosen = self._chosen_again(record, before=self.done)
                    if chosen is not None:
                        yield chosen
                return

    def skip(self, stored: StreamOffset) -> None:
        """Continues after the current chunk, or after its segment if no chunk can be read there."""
        self.rest()
        self.done = 0
        if self._chunk_end > self.position:
            self.position = self._chunk_end
        elif self.position.segment < stored.segment:
            self.position = self._next(stored)
        else:
            self.position = stored

    def rest(self) -> None:
        """Closes the open file; the next `read` opens it again."""
        self._reader = None

    def _next(self, stored: StreamOffset) -> StreamOffset:
        return StreamOffset(next_segment(self._path_of, self.position.segment, stored.segment), 0)

    def _read_segment(self, stored: StreamOffset) -> Iterator[tuple[Record | None, int]]:
        number, offset = self.position
        if not number:
            return
        # Before the file is opened: if reading it kills the process, the next one must know where.
        self._on_chunk(self.position)
        try:
            reader = self._open(number)
        except NotATapLogError as error:
            if number < stored.segment:
                logger.warning("a segment is left out: %s", error)
            return
        except OSError:
            return  # the beginning of the segment has not arrived, or was deleted
        # A reopened segment is read from its start, for the descriptors before the position.
        is_known, known = reader is self._reader, 0
        self._reader, self._number = reader, number
        for item in reader.chunks(offset if is_known else 0):
            end = item.offset + item.nbytes if isinstance(item, Damage) else item.end
            if end <= offset:
                continue
            # A chunk at the end of the last segment may have arrived in part. In an earlier segment that is damage.
            torn = item.torn if isinstance(item, Damage) else item.is_torn
            if torn and number == stored.segment:
                break
            if len(reader.consumers) != known:
                known = len(reader.consumers)
                self._know(reader)
            before = StreamOffset(number, end) <= self._again_until
            self._chunk_end = StreamOffset(number, end)
            for record in self._records(reader, item):
                chosen = self._chosen_again(record) if before else self._not_done(record)
                if chosen is not None:
                    yield chosen, 0
            self.position = StreamOffset(number, end)
            if not before:
                self.done = 0
            self._on_chunk(self.position)
            yield None, end - item.offset

    def _know(self, reader: SegmentReader) -> None:
        for consumer_id, (_, described) in reader.consumers.items():
            if consumer_id in self._described:
                continue
            if len(self._described) >= limits.DESCRIPTIONS:
                if not self._is_full:
                    logger.warning(
                        "%s: a process has described more than %d taps: the messages of the others are stored, and not "
                        "delivered", reader.path, limits.DESCRIPTIONS,
                    )  # fmt: skip
                self._is_full = True
                return
            self._described[consumer_id] = described

    def _chosen_again(self, record: Record, *, before: int | None = None) -> Stretch | None:
        if self._again is None or not isinstance(record, Stretch):
            return None
        seqs = self._again.seqs.get(record.device, ())
        # All other messages of this part were delivered before the restart.
        mask = np.isin(record.block.seqs, np.fromiter(seqs, np.uint64, len(seqs)))
        if before is not None:
            mask[before:] = False
        if not mask.any():
            return None
        block = record.block.chosen(mask)
        return record._replace(block=block, steps=record.steps[mask], stop=len(block))

    def _not_done(self, record: Record) -> Record | None:
        if not self.done:
            return record
        if isinstance(record, Stretch) and self.done < record.stop:
            return record._replace(start=self.done)
        return None  # it was reported when the chunk was read first

    def _open(self, number: int) -> SegmentReader:
        if self._reader is not None and self._number == number:
            return self._reader
        self._reader = None
        reader = SegmentReader(self._path_of(number))
        # A stream is one process. Each further one would need its state here.
        self._writer = self._writer or reader.writer
        if reader.writer != self._writer:
            raise NotATapLogError(f"{reader.path} is of another process than the segments before it")
        found = reader.info.get("local_devices")
        if isinstance(found, dict):
            self.local_devices = {
                name: place for name, place in found.items() if isinstance(name, str) and type(place) is int
            }
        self._folded = {}
        self._wanted = 0, 0
        return reader

    def _wanted_bits(self, reader: SegmentReader) -> int:
        count, bits = self._wanted
        if count != len(reader.consumers):
            bits = 0
            for number, described in reader.consumers.values():
                bits |= self._wants(described) << (number & 63)
            self._wanted = len(reader.consumers), bits
        return bits | _UNKNOWN

    def _records(self, reader: SegmentReader, item: Chunk | Damage) -> Iterator[Record]:
        if isinstance(item, Damage):
            yield item
        elif item.kind in NOTES:
            yield from read_note(reader, item, self._folded.setdefault(item.stream, {}))
        elif item.kind is Kind.FRAMES and item.consumers & self._wanted_bits(reader):
            block, damage = read_frames(reader, item)
            if damage is not None:
                yield damage
            if len(block):
                device = reader.devices.get(item.stream, "")
                self._devices.add(device)
                if len(self._devices) > limits.DEVICES:
                    self._devices.discard(device)
                    yield item.damage(reader.path, f"of more than {limits.DEVICES} devices in one stream")
                    return
                steps = self._steps.as_they_come(device, block, item.step_before)
                folded_here = self._folded.setdefault(item.stream, {})
                yield Stretch(
                    reader.writer,
                    device,
                    block,
                    steps,
                    0,
                    len(block),
                    folded_here,
                    self._described,
                    reader.path,
                )
