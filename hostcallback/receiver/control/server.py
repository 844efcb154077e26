"""The server of this process's control socket."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from pathlib import Path

from hostcallback.receiver.control import protocol, socket_path
from hostcallback.receiver.control.protocol import Client, ControlSocketError, Handler, handle_request
from hostcallback.receiver.log import logger

MAX_CONNECTIONS = 64

OPEN_TRIES = 3

LOCK_SEC = 1.0
"""Seconds for which a process that starts waits for others that start. Then it leaves the clean-up to them."""

SEND_SEC = 5.0
"""Seconds after which the server gives up a client that does not take its answer."""


class _Connection(Client):
    # A connected client, and the beginning of its next request.

    def __init__(self) -> None:
        super().__init__()
        self.received = b""


class ControlServer:
    """Listens on this process's control socket, from a daemon thread that sleeps in the kernel until a client connects.

    Attributes:
        path: of the socket.
        handlers: by command. They may be added at any time.
    """

    def __init__(self, handlers: dict[str, Handler]) -> None:
        """Creates the socket, which only this process's user can open, and starts the thread.

        Raises:
            ControlSocketError: the socket's folder belongs to another user, or its path is too long.
            OSError: the socket cannot be created.
        """
        self.handlers = handlers
        self._listener, self.path = _open()
        self._inode = _inode(self.path)
        # A pipe wakes the thread in `stop`: closing a socket does not end a `select` that waits for it.
        self._wake_reader, self._wake_writer = os.pipe()
        self._connections: dict[socket.socket, _Connection] = {}
        self._thread = threading.Thread(target=self._run, name="hostcallback-control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Removes the socket and ends the thread."""
        with contextlib.suppress(OSError):
            if _inode(self.path) == self._inode:  # not another socket, which has taken its place
                self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"x")
        self._thread.join(SEND_SEC)
        # A thread that still waits for a client would use closed descriptors, which may belong to other files by then.
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def forget(self) -> None:
        """Closes the parent's sockets in a forked child, without telling the parent's clients."""
        self._listener.close()
        for connection in self._connections:
            connection.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == self._wake_reader:
                        self._end(selector)
                        return
                    try:
                        if key.fileobj is self._listener:
                            self._accept(selector)
                        elif isinstance(key.fileobj, socket.socket):
                            self._serve(key.fileobj, selector)
                    except Exception:  # the server must continue: an error of one client must not end it
                        logger.exception("the control socket could not serve a client")

    def _end(self, selector: selectors.BaseSelector) -> None:
        for connection in list(self._connections):
            self._close(connection, selector)
        self._listener.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # Such as too many open files: the client stays in the queue, and is tried again.
            logger.warning("the control socket cannot accept: %s", error)
            time.sleep(1.0)
            return
        peer = socket_path.peer_of(accepted)
        if not socket_path.may_control(peer) or len(self._connections) >= MAX_CONNECTIONS:
            if peer is not None and not socket_path.may_control(peer):
                logger.warning("the control socket refused process %d of the user %d", peer.pid, peer.uid)
            accepted.close()
            return
        accepted.settimeout(SEND_SEC)
        self._connections[accepted] = _Connection()
        selector.register(accepted, selectors.EVENT_READ)

    def _serve(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        connection = self._connections[client]
        try:
            received = client.recv(protocol.MAX_REQUEST)
            if not received:
                raise ConnectionError
            *lines, connection.received = (connection.received + received).split(b"\n")
            if len(connection.received) > protocol.MAX_REQUEST:
                lines.append(connection.received)
            for line in lines:
                if len(line) > protocol.MAX_REQUEST:
                    client.sendall(protocol.pack({"error": "a request is too long", "kind": "ControlError"}))
                    raise ConnectionError
                client.sendall(handle_request(self.handlers, line, connection))
        except OSError:  # the client has disconnected, or does not take its answer
            self._close(client, selector)

    def _close(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        connection = self._connections.pop(client)
        selector.unregister(client)
        client.close()
        connection.closed()


def _open() -> tuple[socket.socket, Path]:
    for left in reversed(range(OPEN_TRIES)):
        try:
            folder = socket_path.make_directory()
            with socket_path.locked(folder, LOCK_SEC) as is_locked:
                if is_locked:
                    socket_path.remove_stale(folder)
                path = folder / f"{os.getpid()}{socket_path.SUFFIX}"
                return _listen(path), path
        except FileNotFoundError:  # the system cleans up its folder for temporary files: it removed ours
            if not left:
                raise
    raise AssertionError("unreachable")


def _listen(path: Path) -> socket.socket:
    # The socket gets its name only when it listens: until then other processes would take it for one of a process that
    # has ended, and remove it.
    if os.path.lexists(path) and not socket_path.is_own_socket(path):
        raise ControlSocketError(f"{path} is not a socket of this user: remove it")
    unpublished = socket_path.unpublished_name(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(unpublished))
        unpublished.chmod(0o600)
        listener.listen(128)
        unpublished.rename(path)  # replaces a socket that an earlier process with this id has left
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            unpublished.unlink(missing_ok=True)
        if "too long" in str(error):
            raise ControlSocketError(
                f"the name of the control socket, {path}, is longer than the system allows: name another folder in "
                "HOSTCALLBACK_CONTROL_DIR"
            ) from error
        raise
    return listener


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
