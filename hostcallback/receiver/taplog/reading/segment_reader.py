"""Reads one segment: its chunks, by the index or from header to header, and its descriptors."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hostcallback.receiver import errors, limits, processes
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_whole
from hostcallback.receiver.wire.pytree import unpack_plain
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

SCAN_BYTES = 1 << 20
"""Bytes that are searched at a time for the next chunk after a damaged part."""


REASON_CHARS = 1000
"""Longer reasons for which messages were lost are cut."""


Unpack = Callable[[bytes], TapDescriptor | None]


class Writer(NamedTuple):
    """The process that wrote a segment.

    Attributes:
        process: identifies the process, across machines and time.
        host: name of its machine.
        pid: its process id there.
        process_index: its index in a program of several processes; None for a program of one.
        job: identifies one run of that program, equal in all its processes; empty if unknown.
        run: name of the run, over all its processes and restarts; empty in logs of earlier versions.
    """

    process: str
    host: str
    pid: int
    process_index: int | None
    job: str = ""
    run: str = ""


class SegmentReader:
    """One segment, which may still be written. One thread at a time.

    Attributes:
        path: of the file.
        writer: the process that wrote it.
        info: the header's description of that process.
        close: closes the file; called automatically when the reader is garbage-collected.
    """

    def __init__(self, path: str | os.PathLike[str], unpack: Unpack = TapDescriptor.unpack) -> None:
        """Opens the file.

        Args:
            path: of the file.
            unpack: reads the bytes of a descriptor; None leaves it out.

        Raises:
            NotATapLogError: it is not a segment, or its beginning is incomplete.
            UnsupportedVersionError: its writer was newer.
            OSError: it cannot be read.
        """
        self.path = Path(path)
        self._unpack = unpack
        # Opening a pipe would wait for its writer.
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.close = weakref.finalize(self, os.close, self._fd)
        try:
            name = str(self.path)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise errors.NotATapLogError(f"{name} is no regular file, expected a segment of a tap log")
            info_bytes, crc = layout.decode_file_header(self.read_at(0, layout.HEADER_BYTES), name)
            info = self.read_at(layout.HEADER_BYTES, info_bytes)
            self.info = layout.decode_info(info, info_bytes, crc, name)
            self.writer = _writer(self.info, name)
        except BaseException:
            self.close()
            raise
        self._first = layout.HEADER_BYTES + layout.align(info_bytes)
        self._devices: dict[int, str] = {}
        self._consumers: dict[int, tuple[int, TapDescriptor]] = {}
        self._described_bytes: dict[int, int] = {}  # by offset of the chunk: chunks may be read again

    @property
    def nbytes(self) -> int:
        """Current length of the file."""
        return os.fstat(self._fd).st_size

    @property
    def devices(self) -> dict[int, str]:
        """Device names by stream, as far as `chunks` has read."""
        return self._devices

    @property
    def consumers(self) -> dict[int, tuple[int, TapDescriptor]]:
        """By consumer id: its bit number in the chunks' masks, and its descriptor. Filled as `chunks` reads."""
        return self._consumers

    def is_closed(self) -> bool:
        """Whether the segment is complete, with an index."""
        return self._index_offset() is not None

    def chunks(self, start: int = 0) -> Iterator[Chunk | layout.Damage]:
        """Yields the chunks of messages and losses, in order, from file offset `start` on (0 for the first).

        Descriptors are collected on the way. A chunk that continues beyond the end of the file is the last one. The
        index is used if it exists and is valid.
        """
        headers = self._read_index() if not start else None
        found = self._walk(max(start, self._first)) if headers is None else self._listed(headers)
        for item in found:
            if isinstance(item, Chunk) and item.kind is layout.Kind.DESCRIPTIONS:
                damage = self._take_descriptions(item)
                if damage is not None:
                    yield damage
            elif isinstance(item, layout.Damage) or item.kind is not layout.Kind.INDEX:
                yield item

    def headers(self, start: int = 0) -> Iterator[Chunk | layout.Damage]:
        """Yields all chunks, descriptors too, from file offset `start` on. Reads only their headers."""
        return self._walk(max(start, self._first))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes of the file; fewer at its end."""
        if nbytes > SCAN_BYTES:
            nbytes = min(nbytes, max(0, self.nbytes - offset))  # a header may claim any length
        data = os.pread(self._fd, nbytes, offset)
        while data and len(data) < nbytes:  # pread may return fewer bytes than exist
            more = os.pread(self._fd, nbytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def lost_in(self, chunk: Chunk) -> layout.Lost | layout.Damage:
        """Decodes a chunk of the kind LOST."""
        data = read_whole(self, chunk)
        if isinstance(data, layout.Damage):
            return data
        try:
            return _lost(unpack_plain(data))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            return chunk.damage(self.path, f"a record of lost messages is damaged ({error})")

    def folded_in(self, chunk: Chunk) -> dict[int, int] | layout.Damage:
        """Decodes a chunk of the kind FOLDED; returns counts by sequence number."""
        data = read_whole(self, chunk)
        if isinstance(data, layout.Damage):
            return data
        pairs = np.frombuffer(data[: len(data) // 16 * 16], "<u8").reshape(-1, 2)
        return dict(pairs.tolist())

    def rules_in(self, chunk: Chunk) -> list[layout.ThinnedTap] | layout.Damage:
        """Decodes a chunk of the kind RULES."""
        data = read_whole(self, chunk)
        if isinstance(data, layout.Damage):
            return data
        try:
            found = [layout.ThinnedTap(*item) for item in unpack_plain(data)[: limits.DESCRIPTIONS]]
            if not all(
                type(tap.name) is str and type(tap.rules) is str and type(tap.suppressed) is int
                for tap in found
            ):
                raise ValueError("a tap is none")
            return [
                layout.ThinnedTap(
                    tap.name[: limits.NAME_CHARS], tap.rules[: limits.NAME_CHARS], tap.suppressed
                )
                for tap in found
            ]
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            return chunk.damage(self.path, f"a record of the rules of taps is damaged ({error})")

    def exceptions_in(self, chunk: Chunk) -> Any:
        """Decodes a chunk of the kind EXCEPTIONS: plain data that the caller checks."""
        data = read_whole(self, chunk)
        try:
            return data if isinstance(data, layout.Damage) else unpack_plain(data)
        except ValueError as error:
            return chunk.damage(self.path, f"a record of exceptions is damaged ({error})")

    def _index_offset(self) -> int | None:
        nbytes = self.nbytes
        if nbytes < self._first + layout.TRAILER_BYTES:
            return None
        return layout.decode_trailer(
            self.read_at(nbytes - layout.TRAILER_BYTES, layout.TRAILER_BYTES), nbytes
        )

    def _read_index(self) -> list[layout.ChunkHeader] | None:
        offset = self._index_offset()
        if offset is None:
            return None
        header = layout.decode_chunk_header(self.read_at(offset, layout.CHUNK_HEADER_BYTES), offset)
        if header is None or header.kind != layout.Kind.INDEX:
            return None
        data = read_whole(self, Chunk.of(header, self.nbytes))
        if isinstance(data, layout.Damage) or len(data) % layout.CHUNK_HEADER_BYTES or len(data) > offset:
            return None
        headers = layout.decode_index(data)
        # In the order of the file and apart from each other: no chunk is read twice.
        ends = [self._first, *(h.offset + layout.chunk_bytes(h.stored_bytes) for h in headers)]
        is_ordered = all(header.offset >= end for header, end in zip(headers, ends, strict=False))
        return headers if is_ordered and ends[-1] <= offset else None

    def _listed(self, headers: Sequence[layout.ChunkHeader]) -> Iterator[Chunk | layout.Damage]:
        nbytes = self.nbytes
        for header in headers:
            yield Chunk.of(header, nbytes)

    def _walk(self, offset: int) -> Iterator[Chunk | layout.Damage]:
        nbytes = self.nbytes
        while offset < nbytes:
            data = self.read_at(offset, layout.CHUNK_HEADER_BYTES)
            header = layout.decode_chunk_header(data, offset)
            if header is None:
                if self._is_trailer(data, nbytes - offset):
                    return
                damage = self._resynchronize(offset, nbytes)
                yield damage
                if damage.torn:
                    return
                offset += damage.nbytes
                continue
            chunk = Chunk.of(header, nbytes)
            yield chunk
            if chunk.end > nbytes:
                # The chunk is torn. A wrong length is excluded by the header's checksum.
                return
            offset = chunk.end

    def _is_trailer(self, data: bytes, left: int) -> bool:
        # The trailer of a complete file whose index is damaged, or a part of a trailer.
        return left <= layout.TRAILER_BYTES and data[:8] == layout.END_MAGIC[: len(data[:8])]

    def _resynchronize(self, offset: int, nbytes: int) -> layout.Damage:
        # Chunks start at multiples of 64, and their headers contain their own offsets.
        at = self._data_from(offset + 64)
        while at < nbytes:
            data = self.read_at(at, SCAN_BYTES + layout.CHUNK_HEADER_BYTES)
            if len(data) < layout.CHUNK_HEADER_BYTES:
                break
            words = np.frombuffer(data[: len(data) // 64 * 64], "<u4")[::16]
            magic = int.from_bytes(layout.CHUNK_MAGIC, "little")
            for place in np.flatnonzero(words == magic).tolist():
                start = place * 64
                piece = data[start : start + layout.CHUNK_HEADER_BYTES]
                if layout.decode_chunk_header(piece, at + start) is not None:
                    found = at + start
                    return layout.Damage(
                        self.path, offset, found - offset, -1, "damaged: no chunk starts here"
                    )
            at = self._data_from(at + SCAN_BYTES)
        torn = nbytes - offset < layout.CHUNK_HEADER_BYTES
        reason = "ends in a chunk's header" if torn else "damaged: no chunk starts here, or after it"
        return layout.Damage(self.path, offset, nbytes - offset, 0 if torn else -1, reason, torn)

    def _data_from(self, offset: int) -> int:
        # Holes of a sparse file, which may be of any length, are left out.
        try:
            return max(offset, os.lseek(self._fd, offset, os.SEEK_DATA) // 64 * 64)
        except OSError:  # no data follow
            return self.nbytes

    def _take_descriptions(self, chunk: Chunk) -> layout.Damage | None:
        self._described_bytes[chunk.offset] = chunk.raw_bytes
        if sum(self._described_bytes.values()) > limits.DESCRIPTIONS_BYTES:
            self._described_bytes[chunk.offset] = 0
            return chunk.damage(
                self.path, f"more than {limits.DESCRIPTIONS_BYTES} bytes of descriptors of taps in a segment"
            )._replace(messages=0)
        data = read_whole(self, chunk)
        if isinstance(data, layout.Damage):
            return data._replace(messages=0, reason=f"descriptors of taps: {data.reason}")
        unpacker = msgpack.Unpacker(
            max_buffer_size=max(len(data), 1), max_array_len=16, max_map_len=16, max_ext_len=0
        )
        try:
            unpacker.feed(data)
            for item in unpacker:
                if "stream" in item:
                    if len(self._devices) >= limits.DEVICES:
                        raise ValueError(f"more than {limits.DEVICES} devices")
                    self._devices[int(item["stream"])] = str(item["device"])[: limits.NAME_CHARS]
                else:
                    if len(self._consumers) >= limits.DESCRIPTIONS:
                        raise ValueError(f"more than {limits.DESCRIPTIONS} descriptions")
                    described = self._unpack(item["consumer"])
                    if described is None:
                        continue
                    self._consumers[described.consumer_id] = int(item["number"]), described
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
            return chunk.damage(self.path, f"descriptors of taps are invalid ({error})")
        return None


def _lost(found: Any) -> layout.Lost:
    if not isinstance(found, dict):
        raise ValueError("no map")
    lost = layout.Lost(**found)
    numbers = lost.first_seq, lost.last_seq, lost.messages, lost.nbytes, lost.time_ns
    if not all(type(number) is int for number in numbers):
        raise ValueError("a number is none")
    return lost._replace(device=str(lost.device)[: limits.NAME_CHARS], reason=str(lost.reason)[:REASON_CHARS])


def _writer(info: dict[str, Any], name: str) -> Writer:
    try:
        index = info["process_index"]
        index = None if index is None else int(index)
        job = str(info.get("job", ""))
        process, host = (str(info[name])[: limits.NAME_CHARS] for name in ("process", "host"))
        run = str(info.get("run", ""))
        return Writer(
            process,
            host,
            int(info["pid"]),
            index,
            job[: limits.NAME_CHARS],
            run if processes.is_run(run) else "",
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise errors.NotATapLogError(f"{name}: the header of this tap log is damaged: {error!r}") from error
