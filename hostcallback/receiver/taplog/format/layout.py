"""The byte layout of a segment: its header, chunk headers and trailer. Specified in docs/tap-log.md."""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import msgpack

from hostcallback.receiver.errors import UnsupportedVersionError
from hostcallback.receiver.taplog.format.compression import crc32, page_count
from hostcallback.receiver.taplog.format.errors import CutOffLogError, NotATapLogError
from hostcallback.receiver.wire import frame

MAGIC = b"HCBLOG\r\n"
VERSION = 1
NO_STEP = -(2**63)

CHUNK_MAGIC = b"\xb6HLC"
END_MAGIC = b"HCBEND\r\n"

_FILE_HEADER = struct.Struct("<8sIII40xI")
"""magic, version, info_bytes, crc32 of the info, crc32 of the 60 bytes before."""

_TRAILER = struct.Struct("<8sQQ36xI")
"""magic, offset of the index chunk, bytes of the file, crc32 of the 60 bytes before."""

HEADER_BYTES = _FILE_HEADER.size
TRAILER_BYTES = _TRAILER.size
MAX_INFO_BYTES = 1 << 20


ALL_CONSUMERS = 2**64 - 1
"""The consumers of a chunk that may hold messages of any tap."""


class Kind(enum.IntEnum):
    """The content of a chunk."""

    FRAMES = 1
    """Messages of one device, as frames of the wire format."""
    DESCRIPTIONS = 2
    """Descriptors of the consumers and streams of later chunks; msgpack maps."""
    LOST = 3
    """One `Lost`, as a msgpack map."""
    FOLDED = 4
    """Pairs of a sequence number and the count of failures of the same check that were left out before that message."""
    INDEX = 5
    """The headers of all earlier chunks. The last chunk of a segment."""
    RULES = 6
    """The taps that rules thin out, and the messages suppressed since the last such chunk: msgpack, `ThinnedTap`s."""
    EXCEPTIONS = 7
    """The exceptions of tap functions so far, by tap: msgpack, as `FailureHistory.as_dicts`. The last chunk counts."""


class Codec(enum.IntEnum):
    """Compression of a chunk's bytes."""

    NONE = 0
    ZSTD = 1


class ChunkHeader(NamedTuple):
    """The header of a chunk, see docs/tap-log.md.

    Attributes:
        kind: the content, see `Kind`.
        codec: the compression, see `Codec`.
        stream: number of the device; -1 for none.
        offset: of the header in the file.
        stored_bytes: length in the file.
        raw_bytes: uncompressed length.
        messages: number of messages that it holds or is about.
        first_seq: sequence number of the first one.
        last_seq: sequence number of the last one.
        min_time_ns: earliest emission time, Unix nanoseconds.
        max_time_ns: latest emission time, Unix nanoseconds.
        step_before: step before the first message, or `NO_STEP`.
        min_step: smallest step.
        max_step: largest step.
        consumers: bit n is set if it has messages of a consumer whose number is n modulo 64.
    """

    kind: int
    codec: int
    stream: int
    offset: int
    stored_bytes: int
    raw_bytes: int
    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0
    min_time_ns: int = 0
    max_time_ns: int = 0
    step_before: int = NO_STEP
    min_step: int = NO_STEP
    max_step: int = NO_STEP
    consumers: int = 0


_CHUNK_HEADER = struct.Struct("<4sBB2xi4xQQQQQQqqqqqQ12x")
"""magic, the fields of `ChunkHeader`; a crc32 of these bytes follows."""

_CRC = struct.Struct("<I")

CHUNK_HEADER_BYTES = _CHUNK_HEADER.size + _CRC.size


def align(nbytes: int) -> int:
    """Rounds up to a multiple of 64, where the next part starts."""
    return (nbytes + 63) & -64


def padding(nbytes: int) -> bytes:
    """The zero bytes between `nbytes` and the next part."""
    return bytes(-nbytes & 63)


def table_bytes(stored_bytes: int) -> int:
    """Padded length of a chunk's checksum table."""
    return align(4 * page_count(stored_bytes))


def chunk_bytes(stored_bytes: int) -> int:
    """Distance from a chunk's header to the next one."""
    return CHUNK_HEADER_BYTES + table_bytes(stored_bytes) + align(stored_bytes)


def encode_file_header(info: dict[str, Any]) -> bytes:
    """Encodes the beginning of a segment: its header and its info."""
    packed: bytes = msgpack.packb(info)
    head = _FILE_HEADER.pack(MAGIC, VERSION, len(packed), crc32(packed), 0)[:-4]
    return head + struct.pack("<I", crc32(head)) + packed + padding(len(packed))


def decode_file_header(data: bytes, name: str) -> tuple[int, int]:
    """Returns length and checksum of the info that follows the 64-byte header.

    Raises:
        CutOffLogError: `data` is only the beginning of a header.
        NotATapLogError: `data` is not a header; the text calls the file `name`.
        UnsupportedVersionError: its writer was newer.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
            raise CutOffLogError(
                f"{name}: empty or cut off: a tap log has a header of {HEADER_BYTES} bytes, this file {len(data)} bytes"
            )
        if data[:6] == MAGIC[:6]:
            raise NotATapLogError(
                f"{name}: this tap log was copied as text, which changed it; copy it again as a binary file"
            )
        raise NotATapLogError(
            f"{name} is not a tap log: it starts with {data[:8]!r}, expected {MAGIC!r}; give a log's folder, or one of "
            "the .hcblog files in it"
        )
    _, version, info_bytes, info_crc, crc = _FILE_HEADER.unpack(data[:HEADER_BYTES])
    if version > VERSION:
        raise UnsupportedVersionError(
            f"{name} is a tap log of version {version}, this package reads up to {VERSION}; upgrade hostcallback where "
            "the log is read"
        )
    if crc != crc32(data[: HEADER_BYTES - 4]) or not version or info_bytes > MAX_INFO_BYTES:
        raise NotATapLogError(
            f"{name}: the header of this tap log is damaged (its checksum does not match); restore the file from a copy"
        )
    return info_bytes, info_crc


def decode_info(data: bytes, info_bytes: int, crc: int, name: str) -> dict[str, Any]:
    """Decodes the info after a file header, which is `info_bytes` long.

    Raises:
        NotATapLogError: it is damaged.
        CutOffLogError: the file ends before it does.
        UnsupportedVersionError: the frames are of a newer wire format.
    """
    try:
        info = msgpack.unpackb(data) if crc == crc32(data) else None
    except (ValueError, msgpack.UnpackException):
        info = None
    if len(data) < info_bytes:
        raise CutOffLogError(f"{name}: truncated: the tap log ends before its header does")
    if not isinstance(info, dict):
        raise NotATapLogError(f"{name}: the info after the header of this tap log is damaged")
    if not isinstance(info.get("wire_version"), int) or info["wire_version"] > frame.VERSION:
        raise UnsupportedVersionError(
            f"{name} holds frames of wire format {info.get('wire_version')}, this package reads up to {frame.VERSION}; "
            "upgrade hostcallback where the log is read"
        )
    return info


def encode_chunk_header(header: ChunkHeader) -> bytes:
    """Encodes a chunk header as 128 bytes."""
    head = _CHUNK_HEADER.pack(CHUNK_MAGIC, *header)
    return head + _CRC.pack(crc32(head))


def decode_chunk_header(data: bytes, offset: int) -> ChunkHeader | None:
    """Decodes the header at `offset` of a file; None if `data` is not one."""
    if len(data) < CHUNK_HEADER_BYTES or data[:4] != CHUNK_MAGIC:
        return None
    head = data[: _CHUNK_HEADER.size]
    if _CRC.unpack_from(data, len(head))[0] != crc32(head):
        return None
    header = ChunkHeader._make(_CHUNK_HEADER.unpack(head)[1:])
    return header if header.offset == offset else None


def decode_index(data: bytes) -> list[ChunkHeader]:
    """Decodes the headers in an index."""
    return [
        ChunkHeader._make(_CHUNK_HEADER.unpack_from(data, start)[1:])
        for start in range(0, len(data), CHUNK_HEADER_BYTES)
    ]


def encode_trailer(index_offset: int, file_bytes: int) -> bytes:
    """Encodes the last 64 bytes of a complete segment."""
    head = _TRAILER.pack(END_MAGIC, index_offset, file_bytes, 0)[:-4]
    return head + struct.pack("<I", crc32(head))


def decode_trailer(data: bytes, file_bytes: int) -> int | None:
    """Offset of the index, if `data` is the trailer of a complete segment of `file_bytes`; otherwise None."""
    if len(data) != TRAILER_BYTES or data[:8] != END_MAGIC:
        return None
    _, offset, nbytes, crc = _TRAILER.unpack(data)
    return int(offset) if nbytes == file_bytes and crc == crc32(data[:-4]) else None
