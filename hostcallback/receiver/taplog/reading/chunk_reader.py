"""Reads the intact parts of a chunk, page by page."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.taplog.format import compression, layout
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.frame import HEADER, MAGIC, VERSION

_TAG = int.from_bytes(MAGIC + bytes([VERSION]), "little")
_LOOK = struct.Struct("<II36xIQQ")
"""Fields of a frame's header: tag, flags, meta_bytes, payload_bytes, position."""

_RING_ONLY = 1 << 2 | 1 << 3 | 1 << 30 | 1 << 31


SMALL_BYTES = 64 << 10
"""Chunks up to this size are read at once, with the table of their checksums."""

_KINDS: dict[int, layout.Kind] = {int(kind): kind for kind in layout.Kind}


class File(Protocol):
    """The file of a chunk."""

    path: Path

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes of the file; fewer at its end."""


class Chunk(NamedTuple):
    """A chunk: its header, see `layout.ChunkHeader`, and whether it is complete.

    Attributes:
        is_torn: whether the file ends before the chunk does.
    """

    kind: layout.Kind | int
    codec: int
    stream: int
    offset: int
    stored_bytes: int
    raw_bytes: int
    messages: int
    first_seq: int
    last_seq: int
    min_time_ns: int
    max_time_ns: int
    step_before: int
    min_step: int
    max_step: int
    consumers: int
    is_torn: bool

    @classmethod
    def of(cls, header: layout.ChunkHeader, file_bytes: int) -> Chunk:
        """Creates it from a header in a file of `file_bytes`."""
        end = header.offset + layout.chunk_bytes(header.stored_bytes)
        return cls(_KINDS.get(header.kind, header.kind), *header[1:], is_torn=end > file_bytes)

    @property
    def end(self) -> int:
        """Offset of the next chunk."""
        return self.offset + layout.chunk_bytes(self.stored_bytes)

    def damage(self, path: Path, reason: str) -> layout.Damage:
        """Describes the whole chunk as damaged."""
        return layout.Damage(path, self.offset, self.end - self.offset, self.messages, reason, self.is_torn)


def read_whole(file: File, chunk: Chunk) -> bytes | layout.Damage:
    """Reads the content of a chunk if all of it is intact. Not for chunks of the kind FRAMES."""
    most = limits.COMPRESSED_RAW_BYTES if chunk.kind is layout.Kind.INDEX else limits.DESCRIPTIONS_BYTES
    if max(chunk.stored_bytes, chunk.raw_bytes) > most:
        return chunk.damage(file.path, f"longer than {most} bytes")
    data, good = _stored(file, chunk)
    if not good.all() or len(data) < chunk.stored_bytes:
        reason = "the file ends in a chunk" if chunk.is_torn else "checksums do not match"
        return chunk.damage(file.path, reason)
    if chunk.codec == layout.Codec.ZSTD:
        data = compression.decompress(data, chunk.raw_bytes)
    elif chunk.codec != layout.Codec.NONE:
        return chunk.damage(file.path, f"stored by the unknown method {chunk.codec}")
    if len(data) != chunk.raw_bytes:
        return chunk.damage(file.path, "not as long as its header says")
    return data


def read_frames(file: File, chunk: Chunk) -> tuple[FrameBlock, layout.Damage | None]:
    """Reads the intact frames of a chunk, and describes the damage of the others."""
    reason = excess(chunk)
    if reason:
        return _block(b"", []), chunk.damage(file.path, reason)
    data, good = _stored(file, chunk)
    usable = len(data)
    if chunk.codec == layout.Codec.ZSTD:
        bad = np.flatnonzero(~good)
        data = compression.decompress(
            data[: int(bad[0]) * layout.PAGE_BYTES] if bad.size else data, chunk.raw_bytes
        )
        good = np.ones(layout.page_count(len(data)), np.bool_)
        usable = len(data)
    elif chunk.codec != layout.Codec.NONE:
        return _block(b"", []), chunk.damage(file.path, f"stored by the unknown method {chunk.codec}")
    elif chunk.is_torn and usable % layout.PAGE_BYTES:
        # An incomplete page has no valid checksum; its frames are checked one by one.
        good[-1:] = True
    most = limits.COMPRESSED_MESSAGES if chunk.codec == layout.Codec.ZSTD else len(data)
    offsets = _frames_in(data[:usable], good, chunk.messages, most)
    block = _block(data, offsets)
    missing = chunk.messages - len(offsets)
    if (
        missing <= 0
        and good.all()
        and (chunk.codec == layout.Codec.NONE or usable == chunk.raw_bytes or chunk.is_torn)
    ):
        return block, None
    reason = "the file ends in a chunk" if chunk.is_torn else "checksums do not match"
    return block, chunk.damage(file.path, reason)._replace(messages=max(0, missing))


def excess(chunk: Chunk | layout.ChunkHeader) -> str:
    """Describes why a chunk is too large to be read; empty if it is not."""
    if chunk.stored_bytes > limits.CHUNK_BYTES:
        return f"longer than {limits.CHUNK_BYTES} bytes"
    if chunk.codec == layout.Codec.NONE:
        return ""
    if chunk.raw_bytes > limits.COMPRESSED_RAW_BYTES:
        return f"longer than {limits.COMPRESSED_RAW_BYTES} bytes when it is decompressed"
    if chunk.messages > limits.COMPRESSED_MESSAGES:
        return f"compressed, with more than {limits.COMPRESSED_MESSAGES} messages"
    return ""


def _stored(file: File, chunk: Chunk) -> tuple[bytes, Array]:
    # The stored bytes that exist, and for each page whether it matches its checksum.
    start = chunk.offset + layout.CHUNK_HEADER_BYTES
    table_bytes = layout.table_bytes(chunk.stored_bytes)
    if chunk.stored_bytes <= SMALL_BYTES:
        both = file.read_at(start, table_bytes + chunk.stored_bytes)
        table, data = both[:table_bytes], both[table_bytes:]
    else:
        data = file.read_at(start + table_bytes, chunk.stored_bytes)
        table = file.read_at(start, table_bytes)
    found = layout.page_checksums(data)
    return data, found == np.frombuffer(table.ljust(4 * len(found), b"\0"), "<u4", len(found))


def _frames_in(data: bytes, good: Array, messages: int, most: int) -> list[int] | Array:
    # Offsets of complete frames whose pages are all intact.
    if good.all():
        alike = _alike(data, messages)
        if alike is not None:
            return alike
    offsets: list[int] = []
    bad = np.flatnonzero(~good) * layout.PAGE_BYTES
    end = len(data)
    at, limit = 0, int(bad[0]) if bad.size else end
    while at + HEADER.size <= end and len(offsets) < most:
        size = _frame_bytes(data, at) if at + HEADER.size <= limit else 0
        if size and at + size <= limit:
            offsets.append(at)
            at += size
            continue
        if limit == end:
            break
        # After a damaged page: continue at the next frame that starts in an intact one.
        found = _next_frame(data, good, limit)
        if found is None:
            break
        at = found
        later = bad[bad > at]
        limit = int(later[0]) if later.size else end
    return offsets


def _alike(data: bytes, messages: int) -> Array | None:
    # Recognizes chunks whose frames all have the first one's length, which is the usual case, without a loop.
    if messages < 4 or len(data) % messages or len(data) // messages % 64 or not data:
        return None
    size = len(data) // messages
    words = np.frombuffer(data, "<u8").reshape(messages, size // 8)
    offsets = np.arange(messages, dtype=np.int64) * size
    if not (words[:, 7] == offsets.view(np.uint64)).all():
        return None
    kinds = words[:, (0, 5, 6)]  # tag and flags, length of the metadata, and that of the payload
    if (kinds == kinds[0]).all():  # nearly always: a number is tested in a fraction of the time of an array
        tag, meta, payload = kinds[0].tolist()
        whole = (
            tag & 0xFFFFFFFF == _TAG
            and not tag >> 32 & _RING_ONLY
            and layout.align(meta >> 32) + layout.align(payload) == size - HEADER.size
        )
        return offsets if whole else None
    tags, metas, payloads = kinds.T
    most = np.uint64(63)
    nbytes = ((metas >> np.uint64(32)) + most & ~most) + (payloads + most & ~most)
    is_tag = (tags & np.uint64(0xFFFFFFFF)) == _TAG
    is_ours = (tags & np.uint64(_RING_ONLY << 32)) == 0
    return offsets if (is_tag & is_ours & (nbytes == size - HEADER.size)).all() else None


def _frame_bytes(data: bytes, at: int) -> int:
    # Length of the frame at `at`; 0 if there is none. A newer version counts as a frame: its decoder reports it.
    tag, flags, meta_bytes, payload_bytes, position = _LOOK.unpack_from(data, at)
    if tag & 0xFFFFFF != _TAG & 0xFFFFFF or position != at or flags & _RING_ONLY:
        return 0
    size: int = HEADER.size + layout.align(meta_bytes) + layout.align(payload_bytes)
    return size


def _next_frame(data: bytes, good: Array, start: int) -> int | None:
    for at in range(layout.align(start), len(data) - HEADER.size + 1, 64):
        if (
            good[at // layout.PAGE_BYTES]
            and good[(at + HEADER.size - 1) // layout.PAGE_BYTES]
            and _frame_bytes(data, at)
        ):
            return at
    return None


def _block(data: bytes, offsets: list[int] | Array) -> FrameBlock:
    array = np.frombuffer(data[: len(data) // 64 * 64], np.uint8)
    return FrameBlock(array, np.asarray(offsets, np.int64))
