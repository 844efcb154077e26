"""Forwarding, as client and collector see it: streams, positions and slices; gRPC methods, and their messages.

docs/forwarding.md specifies it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.processes import EXPECTED, is_run

PIECE_BYTES = 1 << 20
"""Largest slice in bytes."""

_EPOCH = re.compile(r"[0-9a-f]{16}")
_SEGMENT = re.compile(rf"p(\d{{6,10}})-({_EPOCH.pattern})-(\d{{6}})\.hcblog")
_FOLDER = re.compile(rf"([^~]{{1,64}})~(\d{{1,10}})~({_EPOCH.pattern})")
MAX_PROCESS = 2**31 - 1
MAX_SEGMENT = 10**6 - 1
MAX_OFFSET = 2**53


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Identity of a stream. Its fields are checked, so that they are safe as file names.

    Attributes:
        run: name of the program's run, equal in all its processes.
        process: number of the process in the run.
        epoch: distinguishes the starts of the process, and its spools.
    """

    run: str
    process: int
    epoch: str

    def __post_init__(self) -> None:
        """Raises BadStreamError for an invalid field."""
        process = self.process
        if not is_run(self.run):
            raise BadStreamError(f"the run is {str(self.run)[:80]!r}, expected {EXPECTED}")
        if not isinstance(process, int) or isinstance(process, bool) or not 0 <= process <= MAX_PROCESS:
            raise BadStreamError(f"the process is {process!r}, expected a number of at least 0")
        if not isinstance(self.epoch, str) or _EPOCH.fullmatch(self.epoch) is None:
            raise BadStreamError(f"the epoch is {str(self.epoch)[:80]!r}, expected 16 hexadecimal digits")

    def __str__(self) -> str:
        """The stream as messages to users name it."""
        return f"{self.run} p{self.process} ({self.epoch})"

    @property
    def folder(self) -> str:
        """Name of the stream's folder in a spool."""
        return f"{self.run}~{self.process}~{self.epoch}"

    @classmethod
    def of_folder(cls, name: str) -> StreamKey | None:
        """The key of a spool folder; None if the name is not a stream's."""
        found = _FOLDER.fullmatch(name)
        if found is None or not is_run(found[1]) or int(found[2]) > MAX_PROCESS:
            return None
        return cls(found[1], int(found[2]), found[3])

    def segment_name(self, number: int) -> str:
        """Name of one of its segments in a collector's folder of the run."""
        return f"p{self.process:06d}-{self.epoch}-{number:06d}.hcblog"


def stored_segment(run: str, name: str) -> tuple[StreamKey, int] | None:
    """The stream and the number of a segment in a collector's folder of a run; None if no collector names files so."""
    found = _SEGMENT.fullmatch(name)
    if found is None or int(found[1]) > MAX_PROCESS:
        return None
    return StreamKey(run, int(found[1]), found[2]), int(found[3])


class StreamOffset(NamedTuple):
    """A position in a stream.

    Attributes:
        segment: number of the segment; 0 before the first.
        offset: bytes from the start of the segment's file.
    """

    segment: int
    offset: int

    @classmethod
    def of(cls, found: Any) -> StreamOffset:
        """Decodes a position that came over the wire.

        Raises:
            BadStreamError: it is not a position.
        """
        if isinstance(found, list) and len(found) == 2 and all(type(number) is int for number in found):
            segment, offset = found
            if 0 <= segment <= MAX_SEGMENT and 0 <= offset <= MAX_OFFSET:
                return cls(segment, offset)
        raise BadStreamError(f"{str(found)[:80]} is not a position in a stream: expected two numbers")


START = StreamOffset(0, 0)


class SegmentSlice(NamedTuple):
    """Bytes of one segment.

    Attributes:
        position: of the first byte.
        data: at most `PIECE_BYTES`.
    """

    position: StreamOffset
    data: bytes

    @property
    def end(self) -> StreamOffset:
        """Position after the last byte."""
        return StreamOffset(self.position.segment, self.position.offset + len(self.data))


# ---- The messages of the protocol ------------------------------------------------------------------------------------

VERSION = 1
SERVICE = "hostcallback.Collector"
FORWARD = "Forward"
FOLLOW = "Follow"
CONTROL = "Control"
"""The gRPC method by which processes wait for requests."""

ASK = "Ask"
"""The gRPC method of controlling clients."""

MAX_MESSAGE_BYTES = PIECE_BYTES + 4096
MAX_HELLO_BYTES = 4096

_FOLDER_BYTES = 112
"""Padded length of a stream's name, which has at most 92 bytes."""

_POSITION = struct.Struct("<QQ")
"""segment, offset."""

POSITION_BYTES = _POSITION.size


def encode_map(**fields: Any) -> bytes:
    """Encodes a message that is not a slice."""
    data: bytes = msgpack.packb(fields)
    return data


def decode_map(data: bytes) -> dict[str, Any]:
    """Reverses `encode_map`.

    Raises:
        BadStreamError: the message is not a map.
    """
    try:
        found = msgpack.unpackb(data) if len(data) <= MAX_HELLO_BYTES else None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        found = None
    if not isinstance(found, dict):
        raise BadStreamError(f"a message of {len(data)} bytes is not a map of msgpack")
    return found


def decode_first(data: bytes) -> dict[str, Any]:
    """Decodes a client's first message: a map with the client's protocol version.

    Raises:
        BadStreamError: the message is not such a map, or of another version.
    """
    found = decode_map(data)
    if found.get("version") != VERSION:
        raise BadStreamError(
            f"the client speaks version {str(found.get('version'))[:20]} of the protocol, this collector {VERSION}: "
            "update hostcallback where it is older"
        )
    return found


def encode_hello(key: StreamKey) -> bytes:
    """Encodes the message that starts a stream."""
    return encode_map(version=VERSION, run=key.run, process=key.process, epoch=key.epoch)


def decode_hello(data: bytes) -> StreamKey:
    """Reverses `encode_hello`.

    Raises:
        BadStreamError: the message does not start a stream, or is of another version.
    """
    found = decode_first(data)
    return StreamKey(found.get("run"), found.get("process"), found.get("epoch"))  # type: ignore[arg-type]


def encode_position(position: StreamOffset) -> bytes:
    """Encodes the end of a stream's stored bytes."""
    data: bytes = msgpack.packb(position)
    return data


def decode_position(data: bytes) -> StreamOffset:
    """Reverses `encode_position`.

    Raises:
        BadStreamError: the data is not a position.
    """
    try:
        return StreamOffset.of(msgpack.unpackb(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadStreamError(f"{len(data)} bytes are not a position in a stream") from error


def encode_place(position: StreamOffset) -> bytes:
    """Encodes the position of the next message's bytes."""
    return _POSITION.pack(*position)


def decode_place(data: bytes) -> StreamOffset:
    """Reverses `encode_place`.

    Raises:
        BadStreamError: the numbers are not a position.
    """
    segment, offset = _POSITION.unpack(data)
    if not 1 <= segment <= MAX_SEGMENT or offset > MAX_OFFSET:
        raise BadStreamError(f"a slice starts at {segment}, {offset}: not a position in a stream")
    return StreamOffset(segment, offset)


def encode_bytes(data: bytes) -> tuple[bytes, ...]:
    """Splits a slice into messages: one, unless its length is that of a position, for which it would be taken."""
    return (data,) if len(data) != POSITION_BYTES else (data[:8], data[8:])


class SliceDecoder:
    """Decodes the messages of one stream: positions, and slices, which follow the bytes before them."""

    def __init__(self) -> None:
        """No message has arrived yet."""
        self._at: StreamOffset | None = None

    def take(self, message: bytes) -> tuple[StreamOffset, bytes] | None:
        """Returns position and bytes of a slice; None for a message that is a position.

        Raises:
            BadStreamError: the message is neither.
        """
        if len(message) == POSITION_BYTES:
            self._at = decode_place(message)
            return None
        if not 1 <= len(message) <= PIECE_BYTES:
            raise BadStreamError(f"a slice has {len(message)} bytes, expected 1 byte to 1 MiB")
        at = self._at
        if at is None:
            raise BadStreamError("a slice came before its position")
        self._at = StreamOffset(at.segment, at.offset + len(message))
        return at, message


def encode_followed(key: StreamKey, piece: SegmentSlice) -> bytes:
    """Encodes a slice with its stream and position, for a client that follows."""
    return b"".join(
        (key.folder.encode().ljust(_FOLDER_BYTES, b"\0"), encode_place(piece.position), piece.data)
    )


def decode_followed(data: bytes) -> tuple[StreamKey, StreamOffset, memoryview]:
    """Reverses `encode_followed`.

    Raises:
        BadStreamError: the data is not such a slice.
    """
    folder = data[:_FOLDER_BYTES].rstrip(b"\0").decode("ascii", "replace")
    key = StreamKey.of_folder(folder)
    if key is None:
        raise BadStreamError(f"{folder[:80]!r} is not the name of a stream")
    start = _FOLDER_BYTES + POSITION_BYTES
    if not start < len(data) <= start + PIECE_BYTES:
        raise BadStreamError(f"a slice has {len(data) - start} bytes, expected 1 byte to 1 MiB")
    return key, decode_place(data[_FOLDER_BYTES:start]), memoryview(data)[start:]
