"""The client of another process's control socket."""

from __future__ import annotations

import os
import socket
from typing import Any

from hostcallback.receiver.control import protocol
from hostcallback.receiver.control.protocol import ControlError, ControlSocketError, NoSuchTapError
from hostcallback.receiver.control.socket_path import may_control, peer_of, refuse_others, sockets
from hostcallback.receiver.files import Closing
from hostcallback.receiver.text import foreign

TIMEOUT_SEC = 10.0

_KINDS = {kind.__name__: kind for kind in (ControlError, ControlSocketError, NoSuchTapError)}


class ControlClient(Closing):
    """A connection to the control socket of one process; a context manager. One thread at a time."""

    def __init__(self, pid: int, timeout_sec: float = TIMEOUT_SEC) -> None:
        """Connects to process `pid`; every answer may take `timeout_sec` seconds.

        Raises:
            ControlSocketError: no such process exists, it does not use hostcallback, or it belongs to another user.
        """
        self.pid = pid
        self._timeout_sec = timeout_sec
        self._socket = _connect(pid, timeout_sec)
        self._received = b""

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Sends a command and returns the process's answer.

        Raises:
            ControlError: the process cannot do that; the text says why.
            ControlSocketError: the process has ended, or does not answer in time.
        """
        try:
            self._socket.sendall(protocol.pack({"command": command, "arguments": arguments}))
            response = protocol.unpack(self._line())
        except TimeoutError as error:
            raise ControlSocketError(
                f"process {self.pid} did not answer within {self._timeout_sec:g} s: it is stopped, or holds Python's "
                "interpreter lock"
            ) from error
        except OSError as error:
            raise ControlSocketError(f"process {self.pid} is gone: {error}") from error
        if "error" in response:
            raise _KINDS.get(str(response.get("kind")), ControlError)(foreign(response["error"]))
        return response.get("result")

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("it closed the connection")
            self._received += received
            if len(self._received) > protocol.MAX_RESPONSE:
                raise ConnectionResetError("its answer does not end")
        line, _, self._received = self._received.partition(b"\n")
        return line


def _connect(pid: int, timeout_sec: float) -> socket.socket:
    path = sockets().get(pid)
    if path is None:
        raise ControlSocketError(_why_not(pid))
    if os.geteuid() != 0:  # root may talk to all processes
        refuse_others(path.parent)
        refuse_others(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_sec)
    try:
        connection.connect(str(path))
        peer = peer_of(connection)
    except PermissionError as error:
        connection.close()
        raise ControlSocketError(f"{path} belongs to another user: run hcb as that user") from error
    except OSError as error:
        connection.close()
        raise ControlSocketError(_why_not(pid)) from error
    # A process of a third user that listens in this user's folder is a trap.
    if not may_control(peer) and os.geteuid() != 0:
        connection.close()
        raise ControlSocketError(
            f"the process that listens at {path} belongs to user {peer.uid if peer else '?'}, not to you: remove the "
            "socket"
        )
    return connection


def _why_not(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"no process {pid} exists: `hcb ctl` lists the processes that can be controlled"
    except PermissionError:
        return f"process {pid} belongs to another user: run hcb as that user"
    except OverflowError:
        return f"{pid} is not a process id"
    return (
        f"process {pid} has no control socket: it does not use hostcallback, it has traced no tap yet, it keeps its "
        "sockets in another folder (HOSTCALLBACK_CONTROL_DIR), or it was started with HOSTCALLBACK_CONTROL_SOCKET=0"
    )


def processes() -> list[dict[str, Any]]:
    """Describes each process that this user can reach, in the order of process ids."""
    found = []
    for pid in sorted(sockets()):
        try:
            # 2 s each: one stopped process must not make the whole list wait.
            with ControlClient(pid, 2.0) as client:
                found.append(client.ask("process"))
        except ControlError:  # ended since the folder was listed, or belongs to another user
            continue
    return found
