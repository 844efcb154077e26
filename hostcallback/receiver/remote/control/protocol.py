"""The control messages between processes, collector and controlling clients. Specified in docs/forwarding.md.

Requests and answers are the lines of `hostcallback.receiver.control.protocol`; this module encodes the envelopes around
them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from hostcallback.receiver.control.protocol import MAX_REQUEST
from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.text import printable

NO_CONTROL = (
    "the collector at {} does not relay control requests: it was started with --no-control, or is of an older "
    "version"
)
"""Explains that a collector, whose address is to be inserted, does not implement live control."""

COMMANDS = ("process", "taps", "rules", "figures", "knobs", "set", "stop")
"""Commands that processes answer through a collector, as on their control sockets."""

MAX_ANSWER = forwarding_protocol.PIECE_BYTES
MAX_RUNS = 128
MAX_HOST = 255
MAX_COMMAND = 300
MAX_SEC = 60.0
"""Longest time in seconds for which a collector waits for processes."""

_REQUEST = struct.Struct("<QQ")
"""session, number; the request follows, or nothing when the session ends."""

_ANSWER = struct.Struct("<Q")
"""The request's number; the answer follows."""


@dataclass(frozen=True, slots=True)
class Controlled:
    """A process that a collector can reach. All fields are the process's own claims, checked for type and length only.

    Attributes:
        key: of its stream.
        host: the machine's name.
        pid: the process id on that machine.
        command: its command line.
        started: start of the process, in seconds since 1970.
    """

    key: forwarding_protocol.StreamKey
    host: str
    pid: int
    command: str
    started: float

    def __str__(self) -> str:
        """The process as messages to users name it."""
        return f"{self.key.run} p{self.key.process} (process {self.pid} on {self.host})"

    @property
    def instance(self) -> tuple[str, int, str, int]:
        """Identity of the process, equal for all its streams."""
        return self.key.run, self.key.process, self.host, self.pid


def encode_process(key: forwarding_protocol.StreamKey, about: dict[str, Any]) -> bytes:
    """Encodes a process's first message: its stream, and its answer to the command `process`."""
    return forwarding_protocol.encode_map(
        version=forwarding_protocol.VERSION, **_fields(_controlled(key, about))
    )


def decode_process(data: bytes) -> Controlled:
    """Reverses `encode_process`.

    Raises:
        BadStreamError: the message is not a process's first one, or of a newer version.
    """
    return _process_of(forwarding_protocol.decode_first(data))


def _fields(process: Controlled) -> dict[str, Any]:
    key = process.key
    return {
        "run": key.run, "process": key.process, "epoch": key.epoch, "host": process.host, "pid": process.pid,
        "command": process.command, "started": process.started,
    }  # fmt: skip


def _process_of(found: dict[str, Any]) -> Controlled:
    key = forwarding_protocol.StreamKey(found.get("run"), found.get("process"), found.get("epoch"))  # type: ignore[arg-type]
    return _controlled(key, found)


def _controlled(key: forwarding_protocol.StreamKey, found: dict[str, Any]) -> Controlled:
    host, pid, command, started = (found.get(name) for name in ("host", "pid", "command", "started"))
    if (
        not isinstance(host, str)
        or not isinstance(command, str)
        or not isinstance(pid, int)
        or not isinstance(started, int | float)
        or not 0 <= pid < 1 << 32
        or not math.isfinite(started)
    ):
        raise BadStreamError("a process sent an invalid description, expected host, pid, command, started")
    return Controlled(
        key, printable(host[:MAX_HOST]), int(pid), printable(command[:MAX_COMMAND]), float(started)
    )


def encode_request(session: int, number: int, line: bytes) -> bytes:
    """Encodes a request to a process, for one client's session; an empty line ends that session."""
    return _REQUEST.pack(session, number) + line


def decode_request(data: bytes) -> tuple[int, int, bytes]:
    """Reverses `encode_request`.

    Raises:
        BadStreamError: the message is not a request.
    """
    if not _REQUEST.size <= len(data) <= _REQUEST.size + MAX_REQUEST:
        raise BadStreamError(f"a request has {len(data)} bytes, expected {_REQUEST.size} to 64 KiB more")
    return *_REQUEST.unpack_from(data), data[_REQUEST.size :]


def encode_answer(number: int, line: bytes) -> bytes:
    """Encodes a process's answer to the request with that number."""
    return _ANSWER.pack(number) + line


def decode_answer(data: bytes) -> tuple[int, bytes]:
    """Reverses `encode_answer`.

    Raises:
        BadStreamError: the message is not an answer.
    """
    if not _ANSWER.size < len(data) <= _ANSWER.size + MAX_ANSWER:
        raise BadStreamError(f"an answer has {len(data)} bytes, expected {_ANSWER.size + 1} to 1 MiB more")
    return *_ANSWER.unpack_from(data), data[_ANSWER.size :]


def encode_asking(runs: str) -> bytes:
    """Encodes a controlling client's first message: the run, or a pattern of runs."""
    return forwarding_protocol.encode_map(version=forwarding_protocol.VERSION, run=runs)


def decode_asking(data: bytes) -> str:
    """Reverses `encode_asking`.

    Raises:
        BadStreamError: the message is not a client's first one, or of a newer version.
    """
    runs = forwarding_protocol.decode_first(data).get("run")
    if not isinstance(runs, str) or not 0 < len(runs) <= MAX_RUNS:
        raise BadStreamError(
            f"the run is {str(runs)[:80]!r}, expected a run, or a pattern of runs, of at most {MAX_RUNS} characters"
        )
    return runs


def encode_told(process: Controlled | None, line: bytes | None) -> bytes:
    """Encodes a message to a controlling client: a process's answer, with None for none in time.

    Without a process it is the collector's own answer, which comes last.
    """
    data: bytes = msgpack.packb([None if process is None else _fields(process), line])
    return data


def decode_told(data: bytes) -> tuple[Controlled | None, bytes | None]:
    """Reverses `encode_told`.

    Raises:
        BadStreamError: the message is not a collector's.
    """
    try:
        found = (
            msgpack.unpackb(data) if len(data) <= MAX_ANSWER + forwarding_protocol.MAX_HELLO_BYTES else None
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        found = None
    if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], bytes | None):
        raise BadStreamError(f"{len(data)} bytes are not an answer of a collector")
    about, line = found
    if about is None:
        return None, line
    if not isinstance(about, dict):
        raise BadStreamError(f"{len(data)} bytes are not an answer of a collector")
    return _process_of(about), line
