"""What client and collector say to each other: methods, and messages as bytes. Specified in docs/forwarding.md."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from receiver.remote.errors import BadStreamError
from receiver.remote.streams import (
    MAX_OFFSET,
    MAX_SEGMENT,
    PIECE_BYTES,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)

VERSION = 1
SERVICE = "hostcallback.Collector"
FORWARD = "Forward"
FOLLOW = "Follow"

MAX_MESSAGE_BYTES = PIECE_BYTES + 4096
MAX_HELLO_BYTES = 4096

_FOLDER_BYTES = 112
"""The name of a stream has at most 92."""

_POSITION = struct.Struct("<QQ")
"""segment, offset."""

POSITION_BYTES = _POSITION.size


def encode_map(**fields: Any) -> bytes:
    """A message other than pieces."""
    data: bytes = msgpack.packb(fields)
    return data


def decode_map(data: bytes) -> dict[str, Any]:
    """Reverses `encode_map`.

    Raises:
        BadStreamError: it is no such message.
    """
    try:
        found = msgpack.unpackb(data) if len(data) <= MAX_HELLO_BYTES else None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        found = None
    if not isinstance(found, dict):
        raise BadStreamError(f"a message of {len(data)} bytes is no map of msgpack")
    return found


def decode_first(data: bytes) -> dict[str, Any]:
    """What a client says first: a map with the version it speaks.

    Raises:
        BadStreamError: it is none, or of another version.
    """
    found = decode_map(data)
    if found.get("version") != VERSION:
        raise BadStreamError(
            f"the client speaks version {str(found.get('version'))[:20]} of the protocol, this collector {VERSION}: "
            "update hostcallback where it is older"
        )
    return found


def encode_hello(key: StreamKey) -> bytes:
    """What a client begins a stream with."""
    return encode_map(version=VERSION, run=key.run, process=key.process, epoch=key.epoch)


def decode_hello(data: bytes) -> StreamKey:
    """Reverses `encode_hello`.

    Raises:
        BadStreamError: it is none, or of a newer version.
    """
    found = decode_first(data)
    return StreamKey(found.get("run"), found.get("process"), found.get("epoch"))  # type: ignore[arg-type]


def encode_position(position: StreamOffset) -> bytes:
    """How far a stream is stored."""
    data: bytes = msgpack.packb(position)
    return data


def decode_position(data: bytes) -> StreamOffset:
    """Reverses `encode_position`.

    Raises:
        BadStreamError: it is none.
    """
    try:
        return StreamOffset.of(msgpack.unpackb(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadStreamError(f"{len(data)} bytes are no position in a stream") from error


def encode_place(position: StreamOffset) -> bytes:
    """Where the bytes of the next message belong."""
    return _POSITION.pack(*position)


def decode_place(data: bytes) -> StreamOffset:
    """Reverses `encode_place`.

    Raises:
        BadStreamError: it is none.
    """
    segment, offset = _POSITION.unpack(data)
    if not 1 <= segment <= MAX_SEGMENT or offset > MAX_OFFSET:
        raise BadStreamError(f"a piece begins at {segment}, {offset}: no position in a stream")
    return StreamOffset(segment, offset)


def encode_bytes(data: bytes) -> tuple[bytes, ...]:
    """The messages that bring bytes of a segment: they are sent as they are, but for as many as a place has."""
    return (data,) if len(data) != POSITION_BYTES else (data[:8], data[8:])


class PieceDecoder:
    """Takes the messages of one stream: places, and bytes, which belong behind those before them."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._at: StreamOffset | None = None

    def take(self, message: bytes) -> tuple[StreamOffset, bytes] | None:
        """Where the bytes of a message belong, and these; None for a message that brings none.

        Raises:
            BadStreamError: it is no such message.
        """
        if len(message) == POSITION_BYTES:
            self._at = decode_place(message)
            return None
        if not 1 <= len(message) <= PIECE_BYTES:
            raise BadStreamError(f"a piece has {len(message)} bytes, expected 1 byte to 1 MiB")
        at = self._at
        if at is None:
            raise BadStreamError("a piece came before the position where it belongs")
        self._at = StreamOffset(at.segment, at.offset + len(message))
        return at, message


def encode_followed(key: StreamKey, piece: SegmentSlice) -> bytes:
    """Some bytes of a segment, and whose it is, for those who follow."""
    return b"".join(
        (key.folder.encode().ljust(_FOLDER_BYTES, b"\0"), encode_place(piece.position), piece.data)
    )


def decode_followed(data: bytes) -> tuple[StreamKey, StreamOffset, memoryview]:
    """Reverses `encode_followed`.

    Raises:
        BadStreamError: it is none.
    """
    folder = data[:_FOLDER_BYTES].rstrip(b"\0").decode("ascii", "replace")
    key = StreamKey.of_folder(folder)
    if key is None:
        raise BadStreamError(f"{folder[:80]!r} names no stream")
    start = _FOLDER_BYTES + POSITION_BYTES
    if not start < len(data) <= start + PIECE_BYTES:
        raise BadStreamError(f"a piece has {len(data) - start} bytes, expected 1 byte to 1 MiB")
    return key, decode_place(data[_FOLDER_BYTES:start]), memoryview(data)[start:]
