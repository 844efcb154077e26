"""Runs a collector until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import grpc.aio

from receiver.remote.collector.service import SERVER_OPTIONS, Collector
from receiver.remote.control.relay import ControlService
from receiver.remote.errors import RemoteError

END_SEC = 2.0
"""Seconds for which streams may continue when the collector ends. Unsent data stays in their spools."""


async def serve(
    collector: Collector,
    address: str,
    credentials: Any = None,
    *,
    control: ControlService | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        collector: the service.
        address: to listen at, `host:port`; port 0 for any free one.
        credentials: for TLS; None for plain text.
        control: relays control requests to processes; None disables control.
        on_listening: called with the port.

    Raises:
        RemoteError: the collector cannot listen at the address.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((collector.handlers(),))
    if control is not None:
        server.add_generic_rpc_handlers((control.handlers(),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise RemoteError(f"cannot listen at {address}: {error}") from error
    if not port:
        raise RemoteError(f"cannot listen at {address}: another program uses it, or it is not this machine's")
    await server.start()
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    on_listening(port)
    await end.wait()
    collector.end()
    await server.stop(END_SEC)
