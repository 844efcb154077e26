"""The services that bring streams into a collector until the process is told to end; one of them listens by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import queue
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from hostcallback.receiver.errors import BadStreamError, GapError, RemoteError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.collector.access import (
    Access,
    Code,
    HelloLimiter,
    Limits,
    Rate,
    Refused,
    SlotLimiter,
    known,
    may,
)
from hostcallback.receiver.remote.collector.follow_server import Following, GrowthWatcher
from hostcallback.receiver.remote.collector.store import AckBatcher, Store, StoredStream
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.text import representation

LOOK_SEC = 0.2
"""Seconds after which the main thread looks whether a signal has come."""

END_SEC = 30.0
"""How long a service may take to end."""

Grown = Callable[[StreamKey, StreamOffset], None]
"""Called when more of a stream is stored, on the thread of the service, which must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFrom:
    """Where a broker is, and what to take from it.

    Attributes:
        url: with the broker's scheme.
        run: only of this run; of all for the empty text.
        token: that the broker asks for; empty for none.
        tls_ca: a file with the certificates that the broker's is checked by; None for the system's.
        insecure: whether the token may go to another machine without TLS.
    """

    url: str
    run: str = ""
    token: str = ""
    tls_ca: str | os.PathLike[str] | None = None
    insecure: bool = False

    def __repr__(self) -> str:
        """The fields, without the token and without passwords."""
        return representation(self, urls=("url",), secrets=("token",))


class CollectingService(Protocol):
    """Stores streams in the collector's folder, and acknowledges what is stored."""

    @property
    def where(self) -> str:
        """For messages: "at HOST:PORT" or "from URL", without a password."""

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Collects until `end` is called. On a thread that does nothing else.

        Args:
            on_ready: called once, when streams can come for the first time.

        Raises:
            RemoteError: it cannot begin. What fails later is logged and tried again.
        """

    def end(self) -> None:
        """Makes `serve` return soon; everything stored is acknowledged first. Any thread."""


def _first(events: queue.SimpleQueue[bool]) -> bool:
    # Looks again and again: a signal that another thread of the process received does not wake this one, in which
    # Python runs the handlers.
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=LOOK_SEC)


def run_until_told(
    services: Sequence[CollectingService], on_ready: Callable[[CollectingService], None]
) -> None:
    """Runs services until SIGTERM or SIGINT, or until one fails. Only from the main thread.

    A second signal ends the process without waiting for the services.

    Raises:
        Exception: what a service raised.
    """
    # Signal handlers put into it, too: other means of waiting could be locked by the thread that the signal interrupts.
    events: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: a signal; False: a service has ended
    failures: list[Exception] = []

    def serve(service: CollectingService) -> None:
        try:
            service.serve(lambda: on_ready(service))
        except Exception as error:
            failures.append(error)
        finally:
            events.put(False)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: events.put(True)) for number in numbers}
    try:
        for service in services:
            threading.Thread(
                target=serve, args=(service,), name="hostcallback-collector", daemon=True
            ).start()
        running = len(services) - (not _first(events))
        for service in services:
            service.end()
        deadline = time.monotonic() + END_SEC
        while running:
            try:
                told = events.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            if told:
                break
            running -= 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]


SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Above the protocol's limit: the service logs a message that is too long, where gRPC would refuse it silently.
    ("grpc.max_receive_message_length", 4 * forwarding_protocol.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", forwarding_protocol.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


class Collector:
    """The service. All of it runs in one event loop.

    Attributes:
        store: stores the streams.
        streams: streams of connected clients.
    """

    def __init__(
        self,
        store: Store,
        *,
        access: Access | None = None,
        limits: Limits | None = None,
        on_grown: Grown = lambda key, position: None,
    ) -> None:
        """Creates the service.

        Args:
            store: stores the streams.
            access: which clients may send and follow.
            limits: on clients.
            on_grown: called when more of a stream is stored.
        """
        self.store = store
        self.streams: dict[StreamKey, asyncio.Future[None]] = {}
        self._access = access or Access()
        self._limits = limits or Limits()
        self._on_grown = on_grown
        self._places = SlotLimiter(self._limits)
        self._hellos = HelloLimiter(self._limits)
        self._fsync = store.fsync
        self._growth = GrowthWatcher()

    def handlers(self) -> Any:
        """Returns the handlers for `grpc.aio.Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            forwarding_protocol.SERVICE,
            {
                forwarding_protocol.FORWARD: grpc.stream_stream_rpc_method_handler(self._forward),
                forwarding_protocol.FOLLOW: grpc.unary_stream_rpc_method_handler(self._follow),
            },
        )

    def end(self) -> None:
        """Ends the calls of following clients once they have received all that is stored."""
        self._growth.end()

    async def _forward(self, requests: AsyncIterator[bytes], context: Any) -> None:
        peer = context.peer()
        key: StreamKey | None = None
        try:
            key = await self._hello(requests, context)
            with self._places.taken(peer):
                await self._serve(key, requests, context)
        except Refused as refused:
            logger.warning("%s from %s: %s", key or "a stream", peer, refused)
            await context.abort(refused.code, str(refused))

    async def _follow(self, request: bytes, context: Any) -> None:
        try:
            with self._places.taken(context.peer()):
                runs = known(self._access.runs_of(context.invocation_metadata() or ()))
                pattern = str(forwarding_protocol.decode_first(request).get("run") or "*")[:128]
                # Not by `fnmatch`, which would keep thousands of patterns.
                wanted = re.compile(fnmatch.translate(pattern)).match
                following = Following(
                    self.store, self._growth, lambda run: may(runs, run) and wanted(run) is not None
                )
                async for item in following.pieces():
                    await context.write(b"" if item is None else forwarding_protocol.encode_followed(*item))
        except BadStreamError as error:
            await context.abort(Code.INVALID_ARGUMENT, str(error))
        except Refused as refused:
            logger.warning("%s may not follow: %s", context.peer(), refused)
            await context.abort(refused.code, str(refused))

    async def _hello(self, requests: AsyncIterator[bytes], context: Any) -> StreamKey:
        runs = known(self._access.runs_of(context.invocation_metadata() or ()))
        try:
            async with self._hellos.waiting(context.peer()):
                key = forwarding_protocol.decode_hello(await anext(aiter(requests)))
        except (TimeoutError, StopAsyncIteration):
            raise Refused(Code.DEADLINE_EXCEEDED, "the client did not say which stream it sends") from None
        except BadStreamError as error:
            raise Refused(Code.INVALID_ARGUMENT, str(error)) from error
        if not may(runs, key.run):
            raise Refused(Code.PERMISSION_DENIED, f"this token does not grant the run {key.run}")
        return key

    async def _serve(self, key: StreamKey, requests: AsyncIterator[bytes], context: Any) -> None:
        # A client that reconnects may arrive before its old connection is known to be dead: the newer one wins.
        older = self.streams.get(key)
        if older is not None and not older.done():
            older.set_result(None)
        fenced = self.streams[key] = asyncio.get_running_loop().create_future()
        taking = asyncio.ensure_future(self._take(key, requests, context, fenced))
        try:
            await asyncio.wait((taking, fenced), return_when=asyncio.FIRST_COMPLETED)
            if fenced.done():
                raise Refused(Code.ABORTED, f"a newer connection sends {key}")
            taking.result()
        finally:
            taking.cancel()
            # Waits until it has ended, so that it appends nothing after this. Its error was raised above.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await taking
            if self.streams.get(key) is fenced:
                del self.streams[key]
                self.store.forget(key)

    async def _take(
        self, key: StreamKey, requests: AsyncIterator[bytes], context: Any, fenced: asyncio.Future[None]
    ) -> None:
        rate = Rate(self._limits.bytes_per_sec)
        try:
            stream = await self._open(key)
            await context.write(forwarding_protocol.encode_position(stream.stored))
            logger.info("%s comes from %s, from %s on", key, context.peer(), tuple(stream.stored))
            decoder = forwarding_protocol.SliceDecoder()
            async with AckBatcher(stream, context.write) as acknowledging:
                async for request in requests:
                    piece = decoder.take(request)
                    if piece is None:
                        continue
                    position, data = piece
                    if fenced.done():
                        return
                    if await self._append(stream, position, data):
                        self._growth.grown(key, stream.stored)
                        self._on_grown(key, stream.stored)
                    acknowledging.stored(len(data))
                    wait_sec = rate.wait_sec(len(data))
                    if wait_sec:
                        await asyncio.sleep(wait_sec)
        except GapError as error:
            raise Refused(Code.FAILED_PRECONDITION, str(error)) from error
        except BadStreamError as error:
            raise Refused(Code.INVALID_ARGUMENT, str(error)) from error
        except OSError as error:
            raise Refused(
                Code.RESOURCE_EXHAUSTED, f"the collector cannot store it: {error.strerror}"
            ) from error

    async def _open(self, key: StreamKey) -> StoredStream:
        # In another thread: a long segment may have to be validated, and the other streams must not wait for it.
        opening = asyncio.ensure_future(asyncio.to_thread(self.store.open, key))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda _: self._forget_unused(key))
            raise

    def _forget_unused(self, key: StreamKey) -> None:
        if key not in self.streams:
            self.store.forget(key)

    async def _append(self, stream: StoredStream, position: StreamOffset, data: Any) -> bool:
        if self._fsync:  # in another thread, since the other streams must not wait for the disk
            return await asyncio.to_thread(stream.append, position, data)
        return stream.append(position, data)


DRAIN_SEC = 2.0
"""Seconds for which streams may continue when the collector ends. Unsent data stays in their spools."""


class CollectorServer:
    """Listens at an address. See `CollectingService`."""

    def __init__(
        self,
        collector: Collector,
        address: str,
        credentials: Any = None,
        *,
        handlers: Sequence[Any] = (),
    ) -> None:
        """Listens when `serve` is called.

        Args:
            collector: the service.
            address: to listen at, `host:port`; port 0 for any free one.
            credentials: for TLS; None for plain text.
            handlers: of more services, as gRPC takes them, such as the one that relays control requests.
        """
        self._collector = collector
        self._address = address
        self._credentials = credentials
        self._handlers = collector.handlers(), *handlers
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
        server.add_generic_rpc_handlers(self._handlers)
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
        await server.stop(DRAIN_SEC)
        # gRPC reports the end of a call before the call's task has ended. `asyncio.run` would cancel such a task,
        # which gRPC reports with a traceback.
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        if unfinished:
            await asyncio.wait(unfinished, timeout=DRAIN_SEC)

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
