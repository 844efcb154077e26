"""The flight recorder: keeps a process's rings in files, from which the last messages of a killed process are read."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver import environment, errors, files, processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.source import Source
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.text import command_line
from hostcallback.receiver.wire import frame
from hostcallback.receiver.wire.array_types import ALIGNMENT

MAGIC = b"HCBRING\n"
VERSION = 1
SUFFIX = ".hcbring"

_CONTROL = struct.Struct("<8sIIQiiqqQQ64s")
"""magic, version, page_bytes, capacity, device, device_id, pid, created_ns, blocks_offset, blocks_bytes, name."""
_HEAD, _RELEASED, _DELIVERED = 128, 192, 200
_RECORD = struct.Struct("<8sQQ")
_RECORD_MAGIC = b"HCBBLOK\n"
_RECORD_PAYLOAD = 128
_DESCRIPTOR = struct.Struct("<QQQ")  # address, nbytes, file offset
_NO_MESSAGE = frame.Flags.PAD | frame.Flags.DISCARDED | frame.Flags.BUSY


class RingFileError(errors.HostCallbackError):
    """A file is not a ring's, or of a newer version."""


@dataclass(frozen=True, slots=True)
class RecoveredFrame:
    """One message of a ring.

    Attributes:
        header: as in the ring.
        frame: the message as a wire frame with its payload inline; empty if the payload is gone.
        delivered: whether its sink received it before the process ended.
    """

    header: frame.Header
    frame: bytes
    delivered: bool


@dataclass(slots=True)
class RingContents:
    """The content of a ring's file.

    Attributes:
        path: of the file.
        name: of the device, such as `cpu:0`.
        head: position after the last frame.
        frames: messages, oldest first.
        unfinished: number of messages that were still being written.
        without_payload: number of messages whose payload did not fit into the file, or was overwritten.
        damaged: (start, end) positions of parts of the ring that hold no frames.
    """

    path: Path
    name: str
    head: int
    frames: list[RecoveredFrame] = field(default_factory=list)
    unfinished: int = 0
    without_payload: int = 0
    damaged: list[tuple[int, int]] = field(default_factory=list)


def read_ring(path: Path) -> RingContents:
    """Reads the messages of a ring's file. Messages that a running process overwrites meanwhile are left out.

    Raises:
        RingFileError: it is not a ring's file, or of a newer version.
        OSError: it cannot be read.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except MemoryError as error:
        raise RingFileError(f"{path} is larger than this machine's memory") from error
    start = data[: _CONTROL.size].tobytes()
    if not start.startswith(MAGIC) or len(start) < _CONTROL.size:
        raise RingFileError(
            f"{path} starts with {start[:8]!r}, expected {MAGIC!r}: it is not the file of a ring (*{SUFFIX})"
        )
    _, version, page, capacity, *_, blocks_at, blocks_bytes, name = _CONTROL.unpack(start)
    if version != VERSION:
        raise RingFileError(
            f"{path} has version {version}, this package reads version {VERSION}: upgrade hostcallback here"
        )
    if capacity < ALIGNMENT or capacity % ALIGNMENT or page < _DELIVERED + 8 or page % 8:
        raise RingFileError(
            f"{path} states a ring of {capacity} bytes from {page} on: its first page is damaged"
        )
    if page + capacity > len(data) or blocks_at + blocks_bytes > len(data):
        raise RingFileError(
            f"{path} has {len(data)} bytes, its first page says {page} + {capacity} + {blocks_bytes}: it was truncated"
        )
    head, released = (int.from_bytes(data[at : at + 8].tobytes(), "little") for at in (_HEAD, _RELEASED))
    delivered = int.from_bytes(data[_DELIVERED : _DELIVERED + 8].tobytes(), "little")
    text = name.split(b"\0")[0].decode(errors="replace")
    contents = RingContents(path, text, head)
    ring = data[page : page + capacity]
    now = _head_now(path)
    # A running process has written more since: the frames that it may have overwritten are skipped.
    overwritten = now - capacity if now != head else -1
    for position, frame_header in _walk(ring, head, contents):
        flags = frame_header.flags
        if position <= overwritten:
            continue
        if flags & frame.Flags.BUSY:
            contents.unfinished += 1
        if flags & (_NO_MESSAGE | frame.Flags.END_OF_STREAM):
            continue
        whole = _whole(data, ring, position, frame_header)
        if not whole:
            contents.without_payload += 1
        contents.frames.append(RecoveredFrame(frame_header, whole, position < min(delivered, released)))
    return contents


def _head_now(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(_HEAD)
        return int.from_bytes(file.read(8), "little")


def _walk(
    ring: np.ndarray[Any, Any], head: int, contents: RingContents
) -> Iterator[tuple[int, frame.Header]]:
    starts = _headers(ring, head)
    capacity = len(ring)
    at, index = (int(starts[0]) if len(starts) else head), 0
    while at != head:
        header = _header_at(ring, at, head)
        if header is not None:
            yield at, header
            at += header.frame_bytes
            continue
        # Only damage can cause this: a frame ends where the next one begins.
        index = int(np.searchsorted(starts, at, side="right"))
        following = int(starts[index]) if index < len(starts) else head
        contents.damaged.append((at, following))
        at = following
    if len(starts) == 0 and head:
        contents.damaged.append((max(0, head - capacity), head))


def _headers(ring: np.ndarray[Any, Any], head: int) -> np.ndarray[Any, Any]:
    # Ascending positions of headers that name their own position; remains of earlier frames name another.
    capacity = len(ring)
    first = max(0, head - capacity)
    lines = ring.view(np.dtype([("tag", "<u4"), ("rest", "V52"), ("position", "<u8")]))
    tag = int.from_bytes(frame.MAGIC + bytes([frame.VERSION]), "little")
    offsets = np.arange(len(lines), dtype=np.uint64) * np.uint64(ALIGNMENT)
    # The position in [first, head) of each offset.
    lap = np.uint64(first // capacity * capacity)
    expected = lap + offsets
    expected[expected < first] += np.uint64(capacity)
    found: np.ndarray[Any, Any] = np.sort(
        expected[(lines["tag"] == tag) & (lines["position"] == expected) & (expected < head)]
    )
    return found


def _header_at(ring: np.ndarray[Any, Any], position: int, head: int) -> frame.Header | None:
    offset = position % len(ring)
    try:
        header = frame.decode_header(ring[offset : offset + frame.HEADER.size].tobytes())
    except errors.WireError:
        return None
    if header.position != position or offset + header.frame_bytes > len(ring):
        return None
    return header if position + header.frame_bytes <= head else None


def _whole(
    data: np.ndarray[Any, Any], ring: np.ndarray[Any, Any], position: int, header: frame.Header
) -> bytes:
    start = position % len(ring)
    if not header.flags & frame.Flags.EXTERNAL:
        return ring[start : start + header.frame_bytes].tobytes()
    metadata_end = start + header.payload_start
    _, nbytes, record_at = _DESCRIPTOR.unpack(ring[metadata_end : metadata_end + _DESCRIPTOR.size].tobytes())
    payload_at = record_at + _RECORD_PAYLOAD
    if not record_at or nbytes != header.payload_bytes or payload_at + nbytes > len(data):
        return b""
    record = data[record_at : record_at + _RECORD.size].tobytes()
    if _RECORD.unpack(record) != (_RECORD_MAGIC, position, nbytes):
        return b""
    inline = header._replace(flags=header.flags & ~frame.Flags.EXTERNAL)
    payload = data[payload_at : payload_at + nbytes].tobytes()
    padded = payload.ljust(inline.frame_bytes - inline.payload_start, b"\0")
    return frame.encode_header(inline) + ring[start + frame.HEADER.size : metadata_end].tobytes() + padded


PROCESS_FILE = "process.json"
TAPS_FILE = "taps.hcblog"

BLOCK_BYTES = 32 << 20
"""Room in a ring's file for payloads outside the ring; payloads that do not fit are not in the file."""


class FlightRecorder:
    """The flight recorder of this process. Any thread.

    Attributes:
        folder: of this process's files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates a folder for this process in `directory`, which only its user can open.

        Raises:
            OSError: it cannot be created or written to.
        """
        started_ns = time.time_ns()
        self.folder = Path(directory).absolute() / f"{platform.node()}-{os.getpid()}-{started_ns // 1000}"
        self._lock = threading.Lock()  # protects the writer of descriptors
        self._pid = os.getpid()
        self._failed = False
        files.PRIVATE.make_folder(self.folder.parent)
        self.folder.mkdir(mode=0o700)
        process = {
            "host": platform.node(),
            "pid": self._pid,
            "started_ns": started_ns,
            "run": processes.own_run(),
            "command": command_line(sys.argv),
            "python": platform.python_version(),
        }
        files.write_private(self.folder / PROCESS_FILE, (json.dumps(process, indent=1) + "\n").encode())
        self._taps = SegmentWriter(self.folder / TAPS_FILE)

    def keep(self, name: str, source: Source) -> None:
        """Moves the ring of a device into a file. Does not raise: a failure is logged.

        Args:
            name: the device's.
            source: reads its ring; a device on the callback transport has no ring, and is not recorded.
        """
        if not isinstance(source, RingSource):
            logger.warning(
                "the flight recorder does not record %s: it needs the native transport, and has Python callbacks",
                name,
            )
            return
        path = self.folder / file_name(name)
        try:
            source.keep_in_file(path, name, BLOCK_BYTES)
        except OSError as error:
            if error.errno == errno.EEXIST:  # the ring is in a file already
                return
            logger.warning(
                "the flight recorder does not record %s: %s",
                name,
                _cure(error, source.capacity_bytes + BLOCK_BYTES),
            )

    def describe(self, consumer: Consumer) -> None:
        """Writes the descriptor of a consumer. Does not raise."""
        if consumer.describe is None:
            return
        try:
            described = consumer.describe()
            with self._lock:
                self._taps.describe(described)
        except ValueError as error:
            logger.debug("the flight recorder cannot describe %s: %s", consumer.name, error)
        except OSError as error:
            if not self._failed:
                logger.warning("the flight recorder cannot write %s: %s", self.folder / TAPS_FILE, error)
            self._failed = True

    def remove(self) -> None:
        """Removes the files when the process ends normally, after it has delivered everything."""
        # A forked child has a copy of this object, and the files are its parent's.
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._taps.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def file_name(name: str) -> str:
    """Name of the file of a device's ring."""
    return name.replace(":", "-").replace("/", "-") + SUFFIX


def _cure(error: OSError, nbytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"its file needs {nbytes >> 20} MiB, and the file system is full: make room, or name another folder"
    if error.errno == errno.EBUSY:
        variable = environment.FLIGHT_RECORDER
        return (
            f"the memory of a GPU's ring is pinned once the ring is used: set {variable} before the first tap"
        )
    return str(error)
