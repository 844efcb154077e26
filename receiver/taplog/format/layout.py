"""How the bytes of a segment are laid out: its header, its chunks' headers, its end. Specified in docs/tap-log.md."""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import msgpack

from receiver import wire
from receiver.taplog.format.checksums import crc32, page_count
from receiver.taplog.format.errors import CutOffLogError, NotATapLogError
from receiver.wire import UnsupportedVersionError

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


class Kind(enum.IntEnum):
    """What a chunk holds."""

    FRAMES = 1
    """Messages of one device, as frames of the wire format."""
    DESCRIPTIONS = 2
    """What the consumers and streams of the chunks behind it are; msgpack maps."""
    LOST = 3
    """One `Lost`, a msgpack map."""
    FOLDED = 4
    """Pairs of a sequence number and how many failures of the same check were left out before that message."""
    INDEX = 5
    """The headers of all chunks before it. The last one."""


class Codec(enum.IntEnum):
    """How a chunk's bytes are stored."""

    NONE = 0
    ZSTD = 1


class ChunkHeader(NamedTuple):
    """The header of a chunk, see docs/tap-log.md.

    Attributes:
        kind: what it holds.
        codec: how it is stored.
        stream: of which device; -1 for none.
        offset: of the header in the file.
        stored_bytes: how long it is in the file.
        raw_bytes: how long it is uncompressed.
        messages: how many it holds or is about.
        first_seq: sequence number of the first one.
        last_seq: of the last one.
        min_time_ns: when the earliest was emitted.
        max_time_ns: when the latest was.
        step_before: the step in force before the first message, or `NO_STEP`.
        min_step: the smallest step.
        max_step: the largest step.
        consumers: bit n: it holds messages of a consumer whose number is n modulo 64.
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
    """`nbytes` rounded up to a multiple of 64: where the next part begins."""
    return (nbytes + 63) & -64


def padding(nbytes: int) -> bytes:
    """The zeros between `nbytes` and the next part."""
    return bytes(-nbytes & 63)


def table_bytes(stored_bytes: int) -> int:
    """How long the table of checksums is, padded."""
    return align(4 * page_count(stored_bytes))


def chunk_bytes(stored_bytes: int) -> int:
    """From a chunk's header to the next one."""
    return CHUNK_HEADER_BYTES + table_bytes(stored_bytes) + align(stored_bytes)


def encode_file_header(info: dict[str, Any]) -> bytes:
    """What a segment begins with."""
    packed: bytes = msgpack.packb(info)
    head = _FILE_HEADER.pack(MAGIC, VERSION, len(packed), crc32(packed), 0)[:-4]
    return head + struct.pack("<I", crc32(head)) + packed + padding(len(packed))


def decode_file_header(data: bytes, name: str) -> tuple[int, int]:
    """Length and checksum of the info that follows the header of 64 bytes.

    Raises:
        CutOffLogError: `data` is only the beginning of one.
        NotATapLogError: `data` is none; `name` is what the text calls it.
        UnsupportedVersionError: its writer was newer.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
            raise CutOffLogError(
                f"{name}: empty or cut off: a tap log has a header of {HEADER_BYTES} bytes, this file {len(data)} bytes"
            )
        if data[:6] == MAGIC[:6]:
            raise NotATapLogError(
                f"{name}: this tap log was changed when it was copied, as text is; copy it again as a binary file"
            )
        raise NotATapLogError(
            f"{name} is no tap log: it begins with {data[:8]!r}, expected {MAGIC!r}; give a log's folder, or one of "
            "the .hcblog files in it"
        )
    _, version, info_bytes, info_crc, crc = _FILE_HEADER.unpack(data[:HEADER_BYTES])
    if version > VERSION:
        raise UnsupportedVersionError(
            f"{name} is a tap log of version {version}, this package reads up to {VERSION}; upgrade hostcallback where "
            "it is read"
        )
    if crc != crc32(data[: HEADER_BYTES - 4]) or not version or info_bytes > MAX_INFO_BYTES:
        raise NotATapLogError(
            f"{name}: the header of this tap log is damaged (its checksum does not match); restore the file from a copy"
        )
    return info_bytes, info_crc


def decode_info(data: bytes, info_bytes: int, crc: int, name: str) -> dict[str, Any]:
    """The map behind a file header, which is `info_bytes` long.

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
        raise CutOffLogError(f"{name}: cut off: the tap log ends before its header does")
    if not isinstance(info, dict):
        raise NotATapLogError(f"{name}: what follows the header of this tap log is damaged")
    if not isinstance(info.get("wire_version"), int) or info["wire_version"] > wire.VERSION:
        raise UnsupportedVersionError(
            f"{name} holds frames of wire format {info.get('wire_version')}, this package reads up to {wire.VERSION}; "
            "upgrade hostcallback where it is read"
        )
    return info


def encode_chunk_header(header: ChunkHeader) -> bytes:
    """Its 128 bytes."""
    head = _CHUNK_HEADER.pack(CHUNK_MAGIC, *header)
    return head + _CRC.pack(crc32(head))


def decode_chunk_header(data: bytes, offset: int) -> ChunkHeader | None:
    """The header at `offset` of a file, or None if `data` is none."""
    if len(data) < CHUNK_HEADER_BYTES or data[:4] != CHUNK_MAGIC:
        return None
    head = data[: _CHUNK_HEADER.size]
    if _CRC.unpack_from(data, len(head))[0] != crc32(head):
        return None
    header = ChunkHeader._make(_CHUNK_HEADER.unpack(head)[1:])
    return header if header.offset == offset else None


def decode_index(data: bytes) -> list[ChunkHeader]:
    """The headers in the bytes of an index."""
    return [
        ChunkHeader._make(_CHUNK_HEADER.unpack_from(data, start)[1:])
        for start in range(0, len(data), CHUNK_HEADER_BYTES)
    ]


def encode_trailer(index_offset: int, file_bytes: int) -> bytes:
    """The last 64 bytes of a segment that was closed."""
    head = _TRAILER.pack(END_MAGIC, index_offset, file_bytes, 0)[:-4]
    return head + struct.pack("<I", crc32(head))


def decode_trailer(data: bytes, file_bytes: int) -> int | None:
    """Where the index is, if these are the last 64 bytes of a closed segment of `file_bytes`."""
    if len(data) != TRAILER_BYTES or data[:8] != END_MAGIC:
        return None
    _, offset, nbytes, crc = _TRAILER.unpack(data)
    return int(offset) if nbytes == file_bytes and crc == crc32(data[:-4]) else None
