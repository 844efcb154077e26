"""Validates a segment's bytes as they arrive, before they are stored: its beginning, and the header of each chunk."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hostcallback.receiver import errors, limits
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.reading.chunk_reader import excess

_INFO_BYTES = struct.Struct("<12xI")


class SegmentValidator:
    """Validates one segment from its first byte on: where its parts begin and end, and which stream wrote it.

    The content of chunks is not checked: chunks have their own checksums, which readers compare.
    """

    def __init__(self, key: StreamKey, number: int) -> None:
        """No byte of the segment has arrived yet."""
        self._key = key
        self._number = number
        self._nbytes = 0
        self._part_at = 0  # offset of the next header
        self._head = b""  # the bytes of it that have arrived
        self._in_header = True
        self._is_complete = False

    def take(self, data: Any) -> None:
        """Validates the next bytes.

        Raises:
            BadStreamError: they are not a segment's, or another stream's. The validator cannot be used any more.
        """
        start, end = self._nbytes, self._nbytes + len(data)
        while True:
            if self._is_complete and end > self._part_at:
                raise errors.BadStreamError(
                    f"segment {self._number} continues after its end at {self._part_at}"
                )
            have = self._part_at + len(self._head)
            if have >= end:
                break
            wanted = self._wanted()
            self._head += bytes(data[have - start : self._part_at + wanted - start])
            if len(self._head) < wanted:
                break
            self._look()
        self._nbytes = end

    def _wanted(self) -> int:
        # Length of the current header, as far as its first bytes tell.
        if not self._in_header:
            ended = self._head[:8] == layout.END_MAGIC if len(self._head) >= 8 else False
            return 8 if len(self._head) < 8 else layout.TRAILER_BYTES if ended else layout.CHUNK_HEADER_BYTES
        if len(self._head) < layout.HEADER_BYTES:
            return layout.HEADER_BYTES
        (info_bytes,) = _INFO_BYTES.unpack_from(
            self._head
        )  # not trusted yet: its checksum covers later bytes
        return layout.HEADER_BYTES + int(min(info_bytes, layout.MAX_INFO_BYTES))

    def _look(self) -> None:
        if self._in_header:
            self._look_at_beginning()
        elif len(self._head) == 8:
            return  # eight bytes tell whether a chunk or the trailer follows, so `_wanted` is asked once more
        elif self._head[:8] == layout.END_MAGIC:
            end = self._part_at + layout.TRAILER_BYTES
            if layout.decode_trailer(self._head, end) is None:
                raise errors.BadStreamError(f"segment {self._number} ends in a damaged trailer")
            self._is_complete = True
            self._go_on(end)
        else:
            header = layout.decode_chunk_header(self._head, self._part_at)
            if header is None:
                raise errors.BadStreamError(
                    f"segment {self._number} has no chunk at {self._part_at}, where one must be"
                )
            reason = excess(header)
            if reason:
                raise errors.BadStreamError(f"segment {self._number} has a chunk that is {reason}")
            if header.kind == layout.Kind.DESCRIPTIONS and header.raw_bytes > limits.DESCRIPTIONS_BYTES:
                raise errors.BadStreamError(
                    f"segment {self._number} has {header.raw_bytes} bytes of descriptions in a chunk: too many"
                )
            self._go_on(self._part_at + layout.chunk_bytes(header.stored_bytes))

    def _look_at_beginning(self) -> None:
        name = f"segment {self._number}"
        try:
            info_bytes, crc = layout.decode_file_header(self._head[: layout.HEADER_BYTES], name)
            if len(self._head) < layout.HEADER_BYTES + info_bytes:
                return
            info = layout.decode_info(self._head[layout.HEADER_BYTES :], info_bytes, crc, name)
        except (errors.TapLogError, errors.UnsupportedVersionError) as error:
            raise errors.BadStreamError(str(error)) from error
        check_info(info, self._key, self._number)
        self._in_header = False
        self._go_on(layout.HEADER_BYTES + layout.align(info_bytes))

    def _go_on(self, part_at: int) -> None:
        self._part_at, self._head = part_at, b""


def check_info(info: dict[str, Any], key: StreamKey, number: int) -> None:
    """Raises BadStreamError if the beginning of a segment does not name this stream and this number."""
    found = info.get("run"), info.get("stream_process"), info.get("process"), info.get("segment")
    if found != (key.run, key.process, key.epoch, number):
        raise errors.BadStreamError(f"segment {number} of {key} says that it is {str(found)[:200]}")
    index = info.get("process_index")
    texts = info.get("host"), info.get("hostcallback"), info.get("job", "")
    if (
        (index is not None and index != key.process)
        or not isinstance(info.get("pid"), int)
        or not all(isinstance(text, str) and len(text) <= 255 for text in texts)
    ):
        raise errors.BadStreamError(f"segment {number} of {key} does not say what process wrote it")


def check_file(path: Path, key: StreamKey, number: int, piece_bytes: int = 1 << 20) -> SegmentValidator:
    """Validates a stored segment, complete or not, and returns the validator for its next bytes.

    Raises:
        BadStreamError: the segment is damaged.
        OSError: it cannot be read.
    """
    check = SegmentValidator(key, number)
    with path.open("rb") as file:
        while data := file.read(piece_bytes):
            check.take(data)
    return check
