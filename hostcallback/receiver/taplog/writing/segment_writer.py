"""Writes one segment: a file that grows by whole chunks, from messages that are collected for each device."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from hostcallback.receiver import files, limits, processes
from hostcallback.receiver.taplog.format import compression, layout
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.wire import array_types, frame, tap_descriptor

_process = uuid.uuid4().hex[:16]
"""Identifies this process: process ids repeat, over time and between machines."""


def _renew_after_fork() -> None:
    global _process
    _process = uuid.uuid4().hex[:16]


processes.in_child(processes.Stage.TAPLOG, _renew_after_fork)


def segment_info(number: int) -> dict[str, Any]:
    """Describes this process, as it writes a segment now, for the segment's header."""
    try:
        package = version("hostcallback")
    except PackageNotFoundError:
        package = ""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "process": _process,
        "process_index": None,
        "job": "",
        "run": "",
        "created_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "segment": number,
        "wire_version": frame.VERSION,
        "hostcallback": package,
    }


class SegmentWriter:
    """Appends chunks to a new file. One thread at a time.

    A method that raises OSError leaves the file unchanged, so it contains whole chunks only.

    Attributes:
        path: of the file.
        number: of the segment among this process's.
        nbytes: its length.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        number: int = 1,
        info: Mapping[str, Any] | None = None,
        compressor: compression.Compressor | None = None,
        permissions: files.Permissions = files.PRIVATE,
    ) -> None:
        """Creates the file.

        Args:
            path: of the file, which must not exist.
            number: of the segment among this process's.
            info: replaces fields of `segment_info`: what the process does not know itself, or another process's.
            compressor: compresses frames, if given.
            permissions: of the file.

        Raises:
            OSError: it cannot be created, or exists.
        """
        self.path = Path(path)
        self.number = number
        self.nbytes = 0
        self._compressor = compressor
        self._headers: list[bytes] = []
        self._streams: dict[str, int] = {}
        self._consumers: dict[int, int] = {}
        self._described_bytes = 0
        self._fd = permissions.create(self.path, os.O_WRONLY)
        try:
            self._write([layout.encode_file_header({**segment_info(number), **(info or {})})])
        except OSError:  # such as a full disk: a file without a header would be reported as damage
            self.abandon()
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise

    @property
    def is_empty(self) -> bool:
        """Whether it has no chunks."""
        return not self._headers

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no path any more. Some file systems count no links of files that have one."""
        try:
            file = os.fstat(self._fd)
            return file.st_nlink == 0 and not os.path.samestat(file, os.stat(self.path))
        except OSError as error:  # a network file system calls a file stale that another machine deleted
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    @property
    def has_many_taps(self) -> bool:
        """Whether it has half of the descriptors that readers take of one segment."""
        return (
            len(self._consumers) >= limits.DESCRIPTIONS // 2
            or self._described_bytes >= limits.DESCRIPTIONS_BYTES // 2
        )

    def describe(self, *described: tap_descriptor.TapDescriptor) -> None:
        """Writes descriptors that are not in the file, before the consumers' first frames.

        Raises:
            ValueError: a consumer cannot be described.
            OSError: it cannot be written.
        """
        items, numbers = self._new_consumers(described)
        if items:
            self._write_chunks([self._descriptions(items)])
            self._consumers.update(numbers)

    def frames(
        self,
        device: str,
        block: FrameBlock,
        described: Mapping[int, tap_descriptor.TapDescriptor],
        *,
        step_before: int = layout.NO_STEP,
        steps: array_types.Array | None = None,
        folded: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Appends messages of one device, after the descriptors that they need. Takes ownership of the block.

        Args:
            device: its name, such as `cpu:0`.
            block: the frames, in order.
            described: descriptors by consumer id; other consumers stay undescribed.
            step_before: step before these messages.
            steps: step of each message, int64, shape (frames,), if any is known.
            folded: pairs of a sequence number and the count of failures of the same check that were left out before it.

        Raises:
            OSError: it cannot be written. Then none of it is in the file.
        """
        found = block.consumers
        items, numbers = self._new_consumers([described[i] for i in found if i in described])
        streams = dict(self._streams)
        stream = streams.setdefault(device, len(streams))
        if len(streams) > len(self._streams):
            items.append({"stream": stream, "device": device})
        chunks: list[tuple[layout.Kind, Any, dict[str, int]]] = [self._descriptions(items)] if items else []
        known = {**self._consumers, **numbers}
        bounds = {
            "stream": stream,
            "messages": len(block),
            "first_seq": int(block.seqs[0]),
            "last_seq": int(block.seqs[-1]),
            "min_time_ns": int(block.times_ns.min()),
            "max_time_ns": int(block.times_ns.max()),
        }
        if folded:
            pairs = np.array(folded, "<u8").tobytes()
            counted = sum(count for _, count in folded)
            chunks.append((layout.Kind.FOLDED, pairs, {**bounds, "messages": counted}))
        if steps is not None:
            bounds.update(step_before=step_before, min_step=int(steps.min()), max_step=int(steps.max()))
        # A mask of 64 bits, by consumer number: readers skip chunks without wanted taps. Numbers above 63 share bits,
        # and undescribed consumers set all bits, because a reader cannot know whether it wants them.
        bounds["consumers"] = sum({1 << (known[i] & 63) for i in found if i in known})
        if any(i not in known for i in found):
            bounds["consumers"] = layout.ALL_CONSUMERS
        block.set_positions()
        chunks.append((layout.Kind.FRAMES, block.data, bounds))
        self._write_chunks(chunks)
        # Only after the write: if it raises, the next one must write the descriptors again.
        self._streams, self._consumers = streams, known

    def lost(self, lost: layout.Lost) -> None:
        """Writes a note of lost messages.

        Raises:
            OSError: it cannot be written.
        """
        packed = msgpack.packb(lost._asdict())
        bounds = {
            "stream": self._streams.get(lost.device, -1),
            "messages": lost.messages,
            "first_seq": lost.first_seq,
            "last_seq": lost.last_seq,
            "min_time_ns": lost.time_ns,
            "max_time_ns": lost.time_ns,
        }
        self._write_chunks([(layout.Kind.LOST, packed, bounds)])

    def rules(self, thinned: Sequence[layout.ThinnedTap], time_ns: int) -> None:
        """Writes which taps rules thin out.

        Raises:
            OSError: it cannot be written.
        """
        self._note(layout.Kind.RULES, [list(tap) for tap in thinned], time_ns)

    def exceptions(self, told: list[dict[str, Any]], time_ns: int) -> None:
        """Writes the exceptions of tap functions so far.

        Raises:
            OSError: it cannot be written.
        """
        self._note(layout.Kind.EXCEPTIONS, told, time_ns)

    def _note(self, kind: layout.Kind, told: list[Any], time_ns: int) -> None:
        times = {"stream": -1, "min_time_ns": time_ns, "max_time_ns": time_ns}
        # Texts of exceptions may have surrogates, such as those of file names.
        packed = msgpack.packb(told, unicode_errors="backslashreplace")
        self._write_chunks([(kind, packed, times)])

    def sync(self) -> None:
        """Waits until all written data is on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Appends the index and closes the file.

        Raises:
            OSError: the index cannot be written. The file is closed, and complete except for the index.
        """
        if self._fd < 0:
            return
        try:
            index_offset = self.nbytes
            index = b"".join(self._headers)
            _, parts = self._chunk(layout.Kind.INDEX, index, index_offset, {})
            nbytes = index_offset + layout.chunk_bytes(len(index)) + layout.TRAILER_BYTES
            self._write([*parts, layout.encode_trailer(index_offset, nbytes)])
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file without an index. Does not raise."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _new_consumers(
        self, described: Sequence[tap_descriptor.TapDescriptor]
    ) -> tuple[list[Any], dict[int, int]]:
        new = {d.consumer_id: d for d in described if d.consumer_id not in self._consumers}
        first = len(self._consumers)
        numbers = {consumer_id: first + place for place, consumer_id in enumerate(new)}
        return [{"number": numbers[i], "consumer": d.pack().tobytes()} for i, d in new.items()], numbers

    @staticmethod
    def _descriptions(items: Sequence[Any]) -> tuple[layout.Kind, Any, dict[str, int]]:
        return layout.Kind.DESCRIPTIONS, b"".join(map(msgpack.packb, items)), {}

    def _write_chunks(self, chunks: Sequence[tuple[layout.Kind, Any, dict[str, int]]]) -> None:
        parts: list[Any] = []
        headers: list[bytes] = []
        offset = self.nbytes
        for kind, data, fields in chunks:
            header, chunk = self._chunk(kind, data, offset, fields)
            headers.append(header)
            offset += sum(map(len, chunk))
            parts += chunk
        self._write(parts)
        self._headers += headers
        self._described_bytes += sum(
            len(data) for kind, data, _ in chunks if kind is layout.Kind.DESCRIPTIONS
        )

    def _chunk(
        self, kind: layout.Kind, data: Any, offset: int, fields: dict[str, int]
    ) -> tuple[bytes, list[Any]]:
        raw_bytes = memoryview(data).nbytes
        codec = layout.Codec.NONE
        is_small = raw_bytes <= limits.COMPRESSED_RAW_BYTES
        is_small = is_small and fields.get("messages", 0) <= limits.COMPRESSED_MESSAGES
        if self._compressor is not None and kind is layout.Kind.FRAMES and is_small:
            codec, data = layout.Codec.ZSTD, self._compressor(data)
        stored_bytes = memoryview(data).nbytes
        table = layout.page_checksums(data).tobytes()
        stream = fields.pop("stream", -1)
        header = layout.encode_chunk_header(
            layout.ChunkHeader(kind, codec, stream, offset, stored_bytes, raw_bytes, **fields)
        )
        parts = [header, table, layout.padding(len(table)), data, layout.padding(stored_bytes)]
        return header, parts

    def _write(self, parts: Sequence[Any]) -> None:
        views = [memoryview(part) for part in parts]
        total = sum(map(len, views))
        done = 0
        try:
            # The position after the last whole chunk: an interrupted write may have left the file offset elsewhere.
            os.lseek(self._fd, self.nbytes, os.SEEK_SET)
            while done < total:
                done += os.writev(self._fd, _after(views, done))
        except BaseException:
            # An incomplete chunk must not precede a later one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            raise
        self.nbytes += total


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    # The parts that remain after `done` bytes have been written.
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


MEMORY_BYTES = 512 << 10
"""Room for two reads of a device that sends at full speed. Messages that do not fit get new memory."""


class WriteBuffer:
    """The unwritten messages of one device. Its owner's lock protects it.

    Attributes:
        nbytes: of the messages.
        step: of the last written message.
    """

    def __init__(self) -> None:
        """The buffer is empty."""
        self.nbytes = 0
        self.step = layout.NO_STEP
        self._memory = np.empty(0, np.uint8)
        self._used = 0
        self._blocks: list[FrameBlock] = []
        self._folded: list[tuple[int, int]] = []

    def room(self, nbytes: int) -> array_types.Array:
        """Memory for the next block, uint8, shape (nbytes,): right after the earlier blocks if it fits, else new."""
        if not self._memory.size and nbytes > 1 << 12:
            self._memory = np.empty(MEMORY_BYTES, np.uint8)
        end = self._used + nbytes
        if end > self._memory.size:
            return np.empty(nbytes, np.uint8)
        return self._memory[self._used : end]

    def add(self, block: FrameBlock, folded: list[tuple[int, int]]) -> None:
        """Adds messages, and the counts of failures of the same check that were left out before some of them."""
        if block.data.base is self._memory:
            self._used += block.data.size
        self._blocks.append(block)
        self._folded += folded
        self.nbytes += block.data.size

    def take(self) -> tuple[FrameBlock, list[tuple[int, int]]] | None:
        """Returns all messages; None if there are none. The block is valid until the next one is added."""
        if not self._blocks:
            return None
        blocks, folded = self._blocks, self._folded
        if self._used == self.nbytes:
            starts = np.cumsum([0, *(block.data.size for block in blocks[:-1])])
            offsets = [block.offsets + start for block, start in zip(blocks, starts, strict=True)]
            whole = FrameBlock(self._memory[: self._used], np.concatenate(offsets))
        else:
            whole = FrameBlock.join(blocks)
        self._blocks, self._folded = [], []
        self._used = self.nbytes = 0
        return whole, folded
