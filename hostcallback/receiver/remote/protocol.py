"""The protocol between client and collector: gRPC methods, and the encoding of messages. See docs/forwarding.md."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from hostcallback.receiver.remote.credentials import BadStreamError
from hostcallback.receiver.remote.streams import (
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
