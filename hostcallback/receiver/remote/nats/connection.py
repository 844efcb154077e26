"""Subjects of NATS, and a connection to a server with JetStream, for threads: nats-py's event loop runs on a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import re
import ssl
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hostcallback.receiver.errors import HostCallbackError, StreamRefusedError, TransportError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.credentials import read_tls_files, refuse_clear
from hostcallback.receiver.text import foreign, representation, without_password

PREFIX = "taps"
ALL = f"{PREFIX}.>"

MAX_TOKEN = 256

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")


def token(name: str) -> str:
    """Escapes a name as one token of a subject: a byte that is not a letter, digit, `-` or `_` is `=` and two digits.
    `untoken` reverses it. A name whose token is longer than 256 characters becomes `=h` and a hash, irreversibly.
    """
    safe = _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], name.encode(errors="surrogatepass")).decode()
    if len(safe) > MAX_TOKEN:
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return f"=h{digest}"
    return safe or "="


def untoken(token: str) -> str:
    """Reverses `token`."""
    if token == "=":
        return ""
    data = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), token.encode())
    return data.decode(errors="surrogatepass")


def subject(run: str, process: int, tag: str) -> str:
    """Subject of the messages of one tap in one process."""
    return f"{PREFIX}.{token(run)}.{process}.{token(tag)}"


def subject_of_run(run: str) -> str:
    """Subject of all messages of a run; of all runs if `run` is empty."""
    return f"{PREFIX}.{token(run)}.>" if run else ALL


STREAM = "TAPS"
DUPLICATE_SEC = 600.0
"""Seconds for which JetStream recognizes a message's id as a duplicate."""

MAX_AGE_SEC = 7 * 86_400.0
"""Seconds for which a stream that is created here keeps its messages."""

REQUEST_SEC = 5.0

SCHEMES = ("nats://", "tls://")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsServer:
    """Address of a NATS server, and the client's credentials.

    Attributes:
        url: `nats://host:port` or `tls://host:port`; several separated by commas; may contain a user and a password.
        token: the server's token; empty for none.
        tls_ca: file of the certificates that verify the server's; None for the system's.
        tls_cert: file of this client's certificate.
        tls_key: file of the certificate's key.
        stream: name of the JetStream stream.
        insecure: whether a token or a password may go to another machine without TLS.
    """

    url: str
    token: str = ""
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    stream: str = STREAM
    insecure: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid URL, and if a password or a token would go over the network in clear."""
        for url in self.urls:
            # The text of an error of `urlsplit` may be a part of the password.
            host = _host(url)
            if host is None:
                raise ValueError(
                    f"{without_password(self.url)!r} is not an address of a NATS server, such as "
                    "nats://localhost:4222, with %-escapes for the special characters of a user and a password"
                )
            if self.insecure or self.uses_tls(url) or not (self.token or "@" in url):
                continue
            refuse_clear(
                host, without_password(self.url), "token" if self.token else "password",
                cure="begin the address with tls://, or give tls_ca (--nats-ca)",
            )  # fmt: skip

    def __repr__(self) -> str:
        """The fields, without the token and without passwords."""
        return representation(self, urls=("url",), secrets=("token",))

    @property
    def urls(self) -> list[str]:
        """The address of each server."""
        return [url.strip() for url in self.url.split(",")]

    def uses_tls(self, url: str) -> bool:
        """Whether the connection to one of the servers must have TLS."""
        return self.tls_ca is not None or url.startswith("tls://")

    @property
    def shown(self) -> str:
        """The address without a password, for messages."""
        return without_password(self.url)


class NatsConnection:
    """Connects when it is first used, and again when the server returns. Any thread.

    Attributes:
        client: of nats-py; valid after `open`.
        jetstream: the connection's JetStream context; valid after `open`.
        losses: how often JetStream had lost messages that it had acknowledged.
    """

    def __init__(self, server: NatsServer) -> None:
        """Starts the thread of the event loop.

        Raises:
            HostCallbackError: the package nats-py is missing, or a file is not a certificate or a key.
            OSError: a file cannot be read.
        """
        read_tls_files(server.tls_ca, server.tls_cert, server.tls_key)
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
        self.client: Any = None
        self.jetstream: Any = None
        self._opening = asyncio.Lock()  # held while connecting, since several streams may begin at once
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hostcallback-nats", daemon=True)
        self._thread.start()

    @property
    def max_payload(self) -> int:
        """Largest message in bytes that the server accepts."""
        return int(self.client.max_payload)

    def open(self) -> None:
        """Connects if there is no connection, and creates the stream if it does not exist.

        Raises:
            StreamRefusedError: the server refuses this client.
            TransportError: the server cannot be reached, or has no JetStream.
        """

        async def open() -> None:
            async with self._opening:
                await self._open()

        self.wait(open(), 4 * REQUEST_SEC)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Runs a coroutine in the event loop, and returns its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, Any], timeout_sec: float) -> Any:
        """Runs a coroutine in the event loop, and waits for its result.

        Raises:
            TransportError: it failed, or took longer than `timeout_sec`.
        """
        future = self.start(coroutine)
        try:
            return future.result(timeout_sec)
        except TimeoutError as error:
            future.cancel()
            raise TransportError(f"the NATS server at {self.server.shown} does not answer") from error
        except (TransportError, OSError):
            raise
        except Exception as error:
            raise self.translated(error) from error

    def translated(self, error: BaseException) -> TransportError:
        """Translates an exception of nats-py into the sender's errors."""
        text = f"{foreign(error) or type(error).__name__} (NATS at {self.server.shown})"
        if "authorization" in str(error).lower() or "permissions violation" in str(error).lower():
            return StreamRefusedError(text)
        return TransportError(text)

    def note_stored(self, number: int) -> None:
        """Notes that JetStream has acknowledged the message with sequence number `number`."""
        self._last_seq = max(self._last_seq, number)

    def check(self) -> None:
        """Raises TransportError if the connection is broken."""
        if self.client is None or not self.client.is_connected:
            raise TransportError(f"the NATS server at {self.server.shown} cannot be reached at present")

    def close(self) -> None:
        """Closes the connection and ends the thread. Never raises; may be called again."""
        if self._loop.is_closed():
            return
        # nats-py raises errors of many kinds if the server has ended. The connection is closed either way.
        with contextlib.suppress(Exception):
            self.start(self._end()).result(REQUEST_SEC)
        # From another thread, a loop can be told to stop in this way only.
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REQUEST_SEC)
        # A loop that still runs cannot be closed, and its thread is a daemon's.
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        await self._drop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports are released in the loop's next round

    async def _drop(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await _discard(client)

    async def _open(self) -> None:
        if self.client is None or not self.client.is_connected:
            await self._drop()
            self.client = await self._connect()
            self.jetstream = self.client.jetstream(timeout=REQUEST_SEC)
        errors = self.nats.js.errors
        try:
            info = await self.jetstream.stream_info(self.server.stream)
        except errors.NotFoundError:
            info = await self.jetstream.add_stream(
                name=self.server.stream, subjects=[ALL], duplicate_window=DUPLICATE_SEC, max_age=MAX_AGE_SEC
            )
        except (errors.ServiceUnavailableError, errors.NoStreamResponseError) as error:
            raise TransportError(
                f"the NATS server at {self.server.shown} has no JetStream: start it with -js"
            ) from error
        self._compare(info)

    def _compare(self, info: Any) -> None:
        # Compares with the earlier state: a server may come back with an empty folder, or with an old one.
        before, self._created = self._created, info.created
        last = info.state.last_seq
        if before is not None and (info.created != before or last < self._last_seq):
            self.losses += 1
            self._last_seq = 0
            logger.error(
                "JetStream of the NATS server at %s has lost messages that it had acknowledged: messages that no "
                "collector has fetched, and no spool holds any more, are missing. Give the server a persistent folder "
                "(-sd)", self.server.shown,
            )  # fmt: skip
        self._last_seq = max(self._last_seq, last)

    async def _connect(self) -> Any:
        server = self.server
        options: dict[str, Any] = {}
        if server.token:
            options["token"] = server.token
        if any(map(server.uses_tls, server.urls)):
            context = ssl.create_default_context(cafile=server.tls_ca)
            if server.tls_cert is not None and server.tls_key is not None:
                context.load_cert_chain(server.tls_cert, server.tls_key)
            options["tls"] = context

        async def note(error: Exception) -> None:
            pass  # the coroutine that waits for an answer raises the error

        client = self.nats.NATS()
        _require_tls(client, server, self.nats.errors.Error)
        try:
            await client.connect(
                server.urls,
                connect_timeout=REQUEST_SEC,
                allow_reconnect=False,  # the sender publishes unacknowledged messages again, from the spool
                # Twice for each address; by default nats-py tries 60 times, every two seconds, before it reports.
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,
                error_cb=note,
                name="hostcallback",
                **options,
            )
        except BaseException:
            await _discard(client)
            raise
        return client


def _host(url: str) -> str | None:
    if not url.startswith(SCHEMES):
        return None
    try:
        found = urlsplit(url)
        return found.hostname if found.port is None or found.port else None
    except ValueError:
        return None


def _require_tls(client: Any, server: NatsServer, error: type[Exception]) -> None:
    # nats-py begins TLS only if the server's first line, which comes in clear, asks for it. An attacker on the way
    # could have taken that out, to read the password, which the command made here would send.
    make_command = client._connect_command

    def connect_command() -> Any:
        scheme = client._current_server.uri.scheme
        if server.uses_tls(f"{scheme}://") and not client._server_info.get("tls_required"):
            raise error("the server does not use TLS: nothing was sent to it")
        return make_command()

    client._connect_command = connect_command


async def _discard(client: Any) -> None:
    with contextlib.suppress(Exception):
        await client.close()
    # nats-py leaves the socket open if the server refused the client, or ended while it was being closed here.
    transport = getattr(client, "_transport", None)
    if transport is not None:
        transport.close()
        await asyncio.sleep(0)
