"""Runs the server: its sockets, its addresses, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.server.access import Access, new_token
from hostcallback.receiver.ui.server.app import make_app
from hostcallback.receiver.ui.server.connections import HEAD_SEC, Connection
from hostcallback.receiver.ui.server.page_data import PageData

STOP_SEC = 2

ACCEPTING = 3
"""Turns of asyncio's loop after which a connection that it has accepted is made."""


class ListenError(HostCallbackError):
    """The server cannot listen at its address."""


@dataclass(frozen=True, slots=True)
class Listening:
    """How the server is reached.

    Attributes:
        host: address to listen at.
        port: port; 0 for any free one.
        hosts: further names by which browsers may address it.
        token: what clients have to present; empty for a random one.
        tls_cert: file of its certificate, PEM; None for http.
        tls_key: file of the certificate's key.
        framed: whether pages of this machine, such as notebooks, may show it in a frame.
    """

    host: str = "127.0.0.1"
    port: int = 0
    hosts: Collection[str] = ()
    token: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    framed: bool = False


class UiServer:
    """A server of the page. `run` blocks; `start` runs it in a thread.

    Attributes:
        address: where browsers open the page, with the token.
    """

    def __init__(self, data: PageData, listening: Listening) -> None:
        """Listens.

        Raises:
            ListenError: the address cannot be used.
        """
        self._data = data
        self._socket = _listen(listening.host, listening.port)
        try:
            self.address, self._server = _made(data, listening, self._socket.getsockname()[1])
        except BaseException:
            self._socket.close()
            raise
        data.is_ending = lambda: self._server.should_exit  # streams of events end by themselves
        self._thread: threading.Thread | None = None

    def run(self, told: Callable[[], Any] = lambda: None) -> None:
        """Serves until Ctrl-C or SIGTERM; calls `told` before."""
        try:
            told()
            self._server.serve_at(self._socket)
        finally:
            self._end()

    def start(self) -> None:
        """Serves in a daemon thread of this process."""
        self._thread = threading.Thread(target=self._serve, name="hostcallback-ui-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets `run` return soon. Any thread."""
        self._server.should_exit = True

    def close(self) -> None:
        """Ends a server that `start` started."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_SEC + 3.0)
            if self._thread.is_alive():
                self._server.force_exit = True
                self._thread.join(STOP_SEC)
        self._end()

    def _serve(self) -> None:
        self._server.handles_signals = False
        self._server.serve_at(self._socket)

    def _end(self) -> None:
        self._data.close()
        self._socket.close()


class _Server(uvicorn.Server):
    handles_signals = True

    def serve_at(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            runner.run(self.serve(sockets=[listener]))

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        if self.config.is_ssl:
            # uvicorn has no option for it; asyncio waits for a minute.
            create: Any = loop.create_server
            loop.create_server = functools.partial(create, ssl_handshake_timeout=HEAD_SEC)  # type: ignore[method-assign]
        return loop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn closes the connections that it has. One that was accepted just before has not been made yet.
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for _ in range(ACCEPTING):
            await asyncio.sleep(0)
        await super().shutdown(sockets)
        for connection in list(
            self.server_state.connections
        ):  # of clients that do not read what they asked for
            connection.transport.abort()
        await asyncio.sleep(0)

    def capture_signals(self) -> Any:
        # A thread that is not the main one cannot handle signals.
        return super().capture_signals() if self.handles_signals else contextlib.nullcontext()


def _made(data: PageData, listening: Listening, port: int) -> tuple[str, _Server]:
    # The address of the page, and its server.
    token = listening.token or new_token()
    is_local = is_loopback(listening.host)
    is_any = listening.host in ("", "0.0.0.0", "::")
    shown = socket.gethostname() if is_any else listening.host
    name = f"[{shown}]" if ":" in shown else shown
    tls = listening.tls_cert is not None
    address = f"{'https' if tls else 'http'}://{name}:{port}/#token={token}"
    app = Access(
        make_app(data), token, port=port, hosts=[*listening.hosts, shown], is_open=not is_local, tls=tls,
        framed=listening.framed,
    )  # fmt: skip
    config = uvicorn.Config(
        app, http=Connection, proxy_headers=False, log_level="warning", access_log=False, server_header=False,
        date_header=False, lifespan="off", ws="none", timeout_graceful_shutdown=STOP_SEC,
        ssl_certfile=listening.tls_cert, ssl_keyfile=listening.tls_key, limit_concurrency=256,
    )  # fmt: skip
    return address, _Server(config)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(found[0][0], socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
            listener.listen(128)
            on_failure.pop_all()
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen at {host}:{port}: {error}; --port 0 takes any free port") from error
    return listener


def serve_logs(paths: Sequence[str | os.PathLike[str]], listening: Listening) -> UiServer:
    """Serves tap logs in a thread of this process, until `close`.

    Raises:
        ListenError: the address cannot be used.
        OSError: a path does not exist.
    """
    data = PageData(LogIndex(paths), [os.fspath(path) for path in paths])
    try:
        server = UiServer(data, listening)
    except BaseException:
        data.close()
        raise
    server.start()
    return server
