"""The layout of a segment, which docs/tap-log.md specifies: name, header, chunk headers, checksums and trailer."""

from __future__ import annotations

import contextlib
import difflib
import enum
import errno
import functools
import itertools
import os
import struct
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hostcallback.receiver import errors
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire import array_types, frame


class ThinnedTap(NamedTuple):
    """A tap that rules thin out.

    Attributes:
        name: of the tap.
        rules: the rules in force, such as `every=10`; empty if there are none any more.
        suppressed: number of messages that rules suppressed: in a log's note, since the note before.
    """

    name: str
    rules: str
    suppressed: int


class Damage(NamedTuple):
    """A part of a segment that cannot be read. Reading continues after it.

    Attributes:
        path: of the segment.
        offset: start of the part in the file.
        nbytes: its length.
        messages: number of messages in it; -1 if unknown.
        reason: why it cannot be read.
        torn: whether it is the file's incomplete end: the writer was killed, or is still writing.
    """

    path: Path
    offset: int
    nbytes: int
    messages: int
    reason: str
    torn: bool = False

    def __str__(self) -> str:
        """Describes the damage in one line."""
        count = f" with {self.messages} message(s)" if self.messages >= 0 else ""
        return printable(
            f"{self.path}: {self.reason}: skipped {self.nbytes} bytes{count} at offset {self.offset}"
        )


class Lost(NamedTuple):
    """Messages of one device that a log notes as missing.

    Attributes:
        device: its name, such as `cpu:0`.
        first_seq: sequence number of the first one.
        last_seq: sequence number of the last one; messages with numbers between may be present.
        messages: number of missing messages.
        nbytes: their bytes; 0 if unknown.
        time_ns: Unix time in nanoseconds at which the note was written.
        reason: why they are missing.
    """

    device: str
    first_seq: int
    last_seq: int
    messages: int
    nbytes: int
    time_ns: int
    reason: str


SUFFIX = ".hcblog"


def segment_name(created_ns: int, number: int) -> str:
    """Name of this process's segment `number`, started at that time: `20261121T201500.123456-4711-000001.hcblog`."""
    # In UTC: a change of the local time must not give a newer segment an older name.
    seconds, rest = divmod(created_ns, 1_000_000_000)
    time = datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{time}.{rest // 1000:06d}-{os.getpid()}-{number:06d}{SUFFIX}"


def _logs_below(path: Path) -> str:
    # A folder of logs is what `hcb ui` takes.
    folders = sorted({entry.parent.name for entry in path.glob(f"*/*{SUFFIX}")})
    return (
        f"; its subfolders {', '.join(folders[:5])}{' and others' * (len(folders) > 5)} have one"
        if folders
        else ", which record= writes"
    )


def existing(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a log, as a `Path`.

    Raises:
        FileNotFoundError: it does not exist; the text says what a log is, and has the nearest name.
        OSError: it cannot be read.
    """
    found = Path(path)
    try:
        found.stat()
    except FileNotFoundError:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [entry.name for entry in itertools.islice(found.parent.iterdir(), 1000)]
        near = difflib.get_close_matches(found.name, names, n=1)
        meant = f"; did you mean {found.parent / near[0]}?" if near else ""
        text = f"no such tap log: give the folder that record= wrote, or files *{SUFFIX} of it{meant}"
        raise FileNotFoundError(errno.ENOENT, text, str(found)) from None
    return found


def segments_of(path: str | os.PathLike[str]) -> list[Path]:
    """The segments of a path, oldest first: the file itself, or those in a folder.

    Raises:
        NotATapLogError: the folder has none.
        OSError: the path does not exist, or cannot be read.
    """
    path = existing(path)
    if not path.is_dir():
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix == SUFFIX)
    if not found:
        raise errors.NotATapLogError(
            f"{path}: this folder has no tap log, expected files *{SUFFIX}{_logs_below(path)}"
        )
    return found


# ---- The bytes of a segment ------------------------------------------------------------------------------------------

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
            raise errors.CutOffLogError(
                f"{name}: empty or cut off: a tap log has a header of {HEADER_BYTES} bytes, this file {len(data)} bytes"
            )
        if data[:6] == MAGIC[:6]:
            raise errors.NotATapLogError(
                f"{name}: this tap log was copied as text, which changed it; copy it again as a binary file"
            )
        raise errors.NotATapLogError(
            f"{name} is not a tap log: it starts with {data[:8]!r}, expected {MAGIC!r}; give a log's folder, or one of "
            "the .hcblog files in it"
        )
    _, version, info_bytes, info_crc, crc = _FILE_HEADER.unpack(data[:HEADER_BYTES])
    if version > VERSION:
        raise errors.UnsupportedVersionError(
            f"{name} is a tap log of version {version}, this package reads up to {VERSION}; upgrade hostcallback where "
            "the log is read"
        )
    if crc != crc32(data[: HEADER_BYTES - 4]) or not version or info_bytes > MAX_INFO_BYTES:
        raise errors.NotATapLogError(
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
        raise errors.CutOffLogError(f"{name}: truncated: the tap log ends before its header does")
    if not isinstance(info, dict):
        raise errors.NotATapLogError(f"{name}: the info after the header of this tap log is damaged")
    if not isinstance(info.get("wire_version"), int) or info["wire_version"] > frame.VERSION:
        raise errors.UnsupportedVersionError(
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


PAGE_BYTES = 4096

HOLDING_BYTES = 1 << 20
"""Up to this many bytes, releasing the interpreter lock would cost more than the checksum."""


def crc32(data: Any) -> int:
    """zlib's CRC-32, the checksum of everything in a segment."""
    return zlib.crc32(data)


def page_count(stored_bytes: int) -> int:
    """Number of checksums of a chunk with `stored_bytes` bytes."""
    return -(-stored_bytes // PAGE_BYTES)


def page_checksums(data: Any) -> array_types.Array:
    """CRC-32 of each page of `data` (bytes-like): little-endian uint32, shape (pages,)."""
    pages = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    found = np.empty(page_count(pages.size), "<u4")
    native = _native(pages.size <= HOLDING_BYTES)
    if native is None or not native(pages.ctypes.data, pages.size, PAGE_BYTES, found.ctypes.data):
        found[:] = [crc32(pages[start : start + PAGE_BYTES]) for start in range(0, pages.size, PAGE_BYTES)]
    return found


@functools.cache
def _native(holding_lock: bool) -> Any:
    if not native_library.available():
        return None
    library = native_library.load_holding_lock() if holding_lock else native_library.load()
    return library.hcb_page_checksums
