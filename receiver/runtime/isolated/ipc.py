"""What the two processes tell each other: objects on a socket between a process and its own child."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.messages.deferred_errors import OnError
from hostcallback.receiver.runtime.isolated.options import NO_OPTIONS, ReaderOptions

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """What the reading process is to do.

    Attributes:
        folder: where the rings and the descriptions are.
        pid: of the process that writes them.
        devices: names and files of the rings.
        keeping: what else becomes of the messages.
        max_errors: how many failures are kept whole.
        on_error: what becomes of checks that fail.
        remove: whether nobody needs the folder when the other process has died and all is delivered.
    """

    folder: str
    pid: int
    devices: Sequence[tuple[str, str]]
    keeping: ReaderOptions = NO_OPTIONS
    max_errors: int = 100
    on_error: str = OnError.DEFER
    remove: bool = False


class IpcChannel:
    """One end. Any thread may send, one receives.

    The other end is this program's own process, reached by a socket that nobody else has: so objects are pickled.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes the socket over."""
        self._socket = connection
        self._lock = threading.Lock()  # keeps what is sent together

    def send(self, kind: str, **fields: Any) -> bool:
        """Sends an object; False if nobody is there any more."""
        data = pickle.dumps({"kind": kind, **fields})
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            return False
        return True

    def receive(self, timeout_sec: float | None = None) -> dict[str, Any] | None:
        """The next object; None when the other process has ended.

        Raises:
            TimeoutError: nothing came in that time.
        """
        self._socket.settimeout(timeout_sec)
        try:
            first = self._socket.recv(1)
        except TimeoutError:
            raise
        except OSError:
            return None
        self._socket.settimeout(None)
        head = first + self._read(_LENGTH.size - 1) if first else b""
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        data = self._read(length)
        return pickle.loads(data) if len(data) == length else None

    def close(self) -> None:
        """Ends it: the other end receives None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(min(count - len(data), 1 << 20))
            except OSError:
                break
            if not part:
                break
            data += part
        return bytes(data)
