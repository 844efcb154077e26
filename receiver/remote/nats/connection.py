"""A connection to a NATS server with JetStream, for threads: nats-py's event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import ssl
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from receiver.errors import HostCallbackError
from receiver.log import logger
from receiver.remote.errors import LinkError, LinkRefusedError
from receiver.remote.nats.subjects import ALL
from receiver.remote.tls import check_tls_files

STREAM = "TAPS"
DUPLICATE_SEC = 600.0
"""For so long JetStream knows a message again by its id."""

MAX_AGE_SEC = 7 * 86_400.0
"""For so long a stream that is made here keeps messages."""

REQUEST_SEC = 5.0

SCHEMES = ("nats://", "tls://")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsServer:
    """Where a server is, and who comes.

    Attributes:
        url: `nats://host:port`, or `tls://`; several with commas between; a user and a password may be in it.
        token: that the server asks for; empty for none.
        tls_ca: a file with the certificates that the server's is checked by; None for the system's.
        tls_cert: a file with this client's own certificate, and
        tls_key: its key.
        stream: the name of the stream.
    """

    url: str
    token: str = ""
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    stream: str = STREAM

    def __post_init__(self) -> None:
        """Raises ValueError for what is no URL."""
        for url in self.url.split(","):
            if not url.strip().startswith(SCHEMES):
                raise ValueError(f"{url!r} is no address of a NATS server, such as nats://localhost:4222")

    @property
    def shown(self) -> str:
        """The address without a password, for messages."""
        return re.sub(r"://[^,@/]*@", "://", self.url)


class NatsConnection:
    """Connects when it is first used, and again whenever the server is back. Any thread.

    Attributes:
        losses: how often JetStream did not have any more what it had said it stored.
    """

    def __init__(self, server: NatsServer) -> None:
        """Starts the thread.

        Raises:
            HostCallbackError: the package nats-py is missing, or a file is no certificate or key.
            OSError: one cannot be read.
        """
        check_tls_files(server.tls_ca, server.tls_cert, server.tls_key)
        try:
            import nats
            import nats.errors
            import nats.js.api
            import nats.js.errors
        except ImportError as error:
            raise HostCallbackError(
                "NATS needs the package nats-py: pip install 'hostcallback[nats]'"
            ) from error
        self.server = server
        self.nats: Any = nats
        self.losses = 0
        self._created: Any = None
        self._last_seq = 0
        self._client: Any = None
        self._jetstream: Any = None
        self._opening = asyncio.Lock()  # several streams begin at once, by one connection
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hostcallback-nats", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Any:
        """The client of nats-py, when `open` has returned."""
        return self._client

    @property
    def jetstream(self) -> Any:
        """JetStream of the connection, when `open` has returned."""
        return self._jetstream

    @property
    def max_payload(self) -> int:
        """The most bytes that the server takes in a message."""
        return int(self._client.max_payload)

    def open(self) -> None:
        """Connects, if it is not, and sees to it that there is a stream.

        Raises:
            LinkRefusedError: the server does not want this client.
            LinkError: there is no server at present, or none with JetStream.
        """

        async def open() -> None:
            async with self._opening:
                await self._open()

        self.wait(open(), 4 * REQUEST_SEC)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Runs a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, Any], timeout_sec: float) -> Any:
        """The result of a coroutine that is run in the loop.

        Raises:
            LinkError: it failed, or took longer than that.
        """
        future = self.start(coroutine)
        try:
            return future.result(timeout_sec)
        except TimeoutError as error:
            future.cancel()
            raise LinkError(f"the NATS server at {self.server.shown} does not answer") from error
        except (LinkError, OSError):
            raise
        except Exception as error:
            raise self.translated(error) from error

    def translated(self, error: BaseException) -> LinkError:
        """What nats-py raised, as the sender of a stream knows it."""
        text = f"{error or type(error).__name__} (NATS at {self.server.shown})"
        if "authorization" in str(error).lower() or "permissions violation" in str(error).lower():
            return LinkRefusedError(text)
        return LinkError(text)

    def note_stored(self, number: int) -> None:
        """JetStream has said that it has a message by that number."""
        self._last_seq = max(self._last_seq, number)

    def check(self) -> None:
        """Raises LinkError if there is no connection."""
        if self._client is None or not self._client.is_connected:
            raise LinkError(f"there is no NATS server at {self.server.shown} at present")

    def close(self) -> None:
        """Ends it. Does not raise, also when it has ended."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(Exception):
            self.start(self._end()).result(REQUEST_SEC)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REQUEST_SEC)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        await self._drop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed is gone only then

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _discard(client)

    async def _open(self) -> None:
        if self._client is None or not self._client.is_connected:
            await self._drop()
            self._client = await self._connect()
            self._jetstream = self._client.jetstream(timeout=REQUEST_SEC)
        errors = self.nats.js.errors
        try:
            info = await self._jetstream.stream_info(self.server.stream)
        except errors.NotFoundError:
            info = await self._jetstream.add_stream(
                name=self.server.stream, subjects=[ALL], duplicate_window=DUPLICATE_SEC, max_age=MAX_AGE_SEC
            )
        except (errors.ServiceUnavailableError, errors.NoStreamResponseError) as error:
            raise LinkError(
                f"the NATS server at {self.server.shown} has no JetStream: start it with -js"
            ) from error
        self._compare(info)

    def _compare(self, info: Any) -> None:
        # With what was there before: a server may come back with an empty folder, or with an old one.
        before, self._created = self._created, info.created
        last = info.state.last_seq
        if before is not None and (info.created != before or last < self._last_seq):
            self.losses += 1
            self._last_seq = 0
            logger.error(
                "JetStream of the NATS server at %s has lost messages that it had said it stored: those that no "
                "collector has fetched, and no spool holds any more, are missing. Give the server a folder that lasts "
                "(-sd)", self.server.shown,
            )  # fmt: skip
        self._last_seq = max(self._last_seq, last)

    async def _connect(self) -> Any:
        server = self.server
        options: dict[str, Any] = {}
        if server.token:
            options["token"] = server.token
        if server.tls_ca is not None or server.url.startswith("tls://"):
            context = ssl.create_default_context(cafile=server.tls_ca)
            if server.tls_cert is not None and server.tls_key is not None:
                context.load_cert_chain(server.tls_cert, server.tls_key)
            options["tls"] = context

        async def note(error: Exception) -> None:
            pass  # who waits for an answer hears of it

        client = self.nats.NATS()
        try:
            await client.connect(
                [url.strip() for url in server.url.split(",")],
                connect_timeout=REQUEST_SEC,
                allow_reconnect=False,  # what was on its way is published again, from the spool
                error_cb=note,
                name="hostcallback",
                **options,
            )
        except BaseException:
            await _discard(client)
            raise
        return client


async def _discard(client: Any) -> None:
    with contextlib.suppress(Exception):
        await client.close()
    # nats-py leaves sockets open: where a server refused it, and where one ended while it was closed here.
    transport = getattr(client, "_transport", None)
    if transport is not None:
        transport.close()
        await asyncio.sleep(0)
