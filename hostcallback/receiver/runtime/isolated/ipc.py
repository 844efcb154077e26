"""Messages between a process and its reader process: pickled objects on a socket pair."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.runtime.isolated.options import NO_OPTIONS, ReaderOptions

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Configuration of the reader process.

    Attributes:
        folder: folder of the rings and of the tap descriptions.
        pid: process id of the writer.
        devices: device names and files of the rings.
        options: how the reader process records and forwards the messages.
        max_errors: number of failures that are kept whole.
        on_error: action for failed checks.
        remove: whether to remove the folder after the writer has died and all messages are delivered.
    """

    folder: str
    pid: int
    devices: Sequence[tuple[str, str]]
    options: ReaderOptions = NO_OPTIONS
    max_errors: int = 100
    on_error: str = OnError.DEFER
    remove: bool = False


class IpcChannel:
    """One end of the connection. Any thread may send; one thread receives.

    Pickled objects are safe here, because only the parent and its child process have the socket pair.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes ownership of the socket."""
        self._socket = connection
        self._lock = threading.Lock()  # keeps the bytes of one object together

    def send(self, kind: str, **fields: Any) -> bool:
        """Sends an object. Returns False if the other process has closed its end."""
        data = pickle.dumps({"kind": kind, **fields})
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            return False
        return True

    def receive(self, timeout_sec: float | None = None) -> dict[str, Any] | None:
        """Waits for the next object. Returns None if the other process has ended.

        Raises:
            TimeoutError: no object came within `timeout_sec`.
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
        # Pickle is safe here: only this process and the child that it started have an end of the socket pair.
        return pickle.loads(data) if len(data) == length else None

    def close(self) -> None:
        """Closes the connection; the other end receives None."""
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
