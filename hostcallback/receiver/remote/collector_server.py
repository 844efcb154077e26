"""The gRPC server of a collector: takes the streams that processes send to it directly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio

from hostcallback.receiver.remote.collector.service import SERVER_OPTIONS, Collector
from hostcallback.receiver.remote.control.relay import ControlService
from hostcallback.receiver.remote.credentials import RemoteError

END_SEC = 2.0
"""Seconds for which streams may continue when the collector ends. Unsent data stays in their spools."""


class CollectorServer:
    """Listens at an address. See `hostcallback.receiver.remote.collector.services.CollectingService`."""

    def __init__(
        self,
        collector: Collector,
        address: str,
        credentials: Any = None,
        *,
        control: ControlService | None = None,
    ) -> None:
        """Listens when `serve` is called.

        Args:
            collector: the service.
            address: to listen at, `host:port`; port 0 for any free one.
            credentials: for TLS; None for plain text.
            control: relays control requests to processes; None disables control.
        """
        self._collector = collector
        self._address = address
        self._credentials = credentials
        self._control = control
        self._lock = threading.Lock()  # protects what follows
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Event | None = None

    @property
    def where(self) -> str:
        """See `CollectingService`; with the port that was free, once it listens."""
        return f"at {self._address}"

    def serve(self, on_ready: Callable[[], None]) -> None:
        """See `CollectingService`.

        Raises:
            RemoteError: the collector cannot listen at the address.
        """
        asyncio.run(self._serve(on_ready))

    def end(self) -> None:
        """See `CollectingService`."""
        with self._lock:
            self._ended = True
            if self._loop is not None and self._told is not None:
                self._loop.call_soon_threadsafe(self._told.set)

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._collector.handlers(),))
        if self._control is not None:
            server.add_generic_rpc_handlers((self._control.handlers(),))
        host = self._address.rpartition(":")[0]
        self._address = f"{host}:{self._listen(server)}"
        await server.start()
        told = asyncio.Event()
        with self._lock:
            if self._ended:
                told.set()
            self._loop, self._told = asyncio.get_running_loop(), told
        try:
            on_ready()
            await told.wait()
        finally:
            with self._lock:
                self._loop = self._told = None
        self._collector.end()
        await server.stop(END_SEC)

    def _listen(self, server: Any) -> int:
        address = self._address
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise RemoteError(f"cannot listen at {address}: {error}") from error
        if not port:
            raise RemoteError(
                f"cannot listen at {address}: another program uses it, or it is not this machine's"
            )
        return int(port)
