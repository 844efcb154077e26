"""NATS JetStream as a broker; its transport publishes the messages of a spool by tap, each publication with an id."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostcallback.receiver.errors import StreamRefusedError, TransportError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.collector.service import CollectFrom, CollectingService, Grown
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import START, SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.nats.collector import NatsCollector
from hostcallback.receiver.remote.nats.connection import REQUEST_SEC, NatsConnection, NatsServer, token
from hostcallback.receiver.remote.nats.publication import Publication, publication_of_lost, publications_of
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.sender import OnAck, Transport
from hostcallback.receiver.remote.spool import spool_folders, stream_reader
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.reading.merge import LostNote, Stretch

HEADER_BYTES = 64 << 10
"""Bytes of a message that are reserved for everything but frames."""

ID_HEADER = "Nats-Msg-Id"


class NatsTransport:
    """Transport of the streams in one spool folder. See `hostcallback.receiver.remote.sending.sender.Transport`."""

    def __init__(self, server: NatsServer, spool: Path) -> None:
        """The connection opens with the first stream.

        Raises:
            HostCallbackError: the package nats-py is missing.
        """
        self._spool = spool
        self._connection = NatsConnection(server)
        self._stored: dict[StreamKey, tuple[int, StreamOffset]] = {}

    def connect(self, key: StreamKey, on_ack: OnAck) -> NatsStream:
        """Starts to send a stream, or continues it."""
        self._connection.open()
        losses = self._connection.losses

        def acked(position: StreamOffset) -> None:
            self._stored[key] = losses, position
            on_ack(position)

        known, stored = self._stored.get(key, (losses, START))
        if known != losses:  # JetStream has lost messages: publish all that the spool still holds
            stored = START
        return NatsStream(self._connection, self._spool / key.folder, key, stored, acked)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


class NatsStream:
    """One stream that is being sent. See `hostcallback.receiver.remote.sending.sender.TransportStream`."""

    def __init__(
        self, connection: NatsConnection, folder: Path, key: StreamKey, stored: StreamOffset, on_ack: OnAck
    ) -> None:
        """Continues the stream at `stored`."""
        self.stored = stored
        self._connection = connection
        self._key = key
        self._on_ack = on_ack
        self._max_bytes = connection.max_payload
        self._runs = stream_reader.StoredRuns(
            lambda number: folder / f"{number:06d}{spool_folders.SUFFIX}", stored, lambda described: True
        )
        self._last: dict[str, tuple[int, int]] = {}  # of each device, the last message's number and launch
        # Protects everything below, which the sender's thread and the event loop's change; not held for `on_ack`, which
        # takes the spool's lock. `_error` is only set, and read without it.
        self._lock = threading.Lock()
        # Ends of slices, each with the number of publications up to there.
        self._on_way: deque[tuple[StreamOffset, int]] = deque()
        self._published = 0
        self._unanswered: set[int] = set()
        self._error: TransportError | None = None
        self._closed = False

    def send(self, piece: SegmentSlice) -> None:
        """Publishes the messages that are complete with this slice; the rest waits for the next one."""
        self.check()
        for unit in self._units(piece.end):
            self._publish(unit)
        with self._lock:
            self._on_way.append((piece.end, self._published))
        self._acknowledge()

    def check(self) -> None:
        """Raises TransportError if the connection is broken."""
        if self._error is not None:
            raise self._error
        self._connection.check()

    def close(self) -> None:
        """Ends the stream's transport; the connection stays open."""
        with self._lock:
            self._closed = True

    def _units(self, end: StreamOffset) -> Iterator[Publication]:
        for record in self._runs.read(end, 1 << 62):
            if isinstance(record, Stretch):
                # At least half of what the server takes, or a small `max_payload` would leave no room for frames.
                limit = max(self._max_bytes - HEADER_BYTES, self._max_bytes // 2)
                devices, begins = self._runs.local_devices, self._begins(record)
                for unit in publications_of(self._key, record, devices, limit, begins=begins):
                    yield from self._fitting(unit)
            elif isinstance(record, LostNote):
                yield publication_of_lost(self._key, record, self._runs.local_devices)
            elif not record.torn:
                logger.warning(
                    "%s: part of the spool cannot be read, and is not forwarded: %s", self._key, record
                )

    def _begins(self, run: Stretch) -> bool:
        # Whether a launch begins with the run: the message before it is known, and of another launch.
        block, first, last = run.block, run.start, run.stop - 1
        seq, launch = self._last.get(run.device, (-1, 0))
        self._last[run.device] = int(block.seqs[last]), int(block.launches[last])
        return seq >= 0 and int(block.seqs[first]) == seq + 1 and int(block.launches[first]) != launch

    def _fitting(self, unit: Publication) -> Iterator[Publication]:
        if unit.block.data.size + HEADER_BYTES // 2 < self._max_bytes or len(unit.encode()) < self._max_bytes:
            yield unit
            return
        first, last = int(unit.block.seqs[0]), int(unit.block.seqs[-1])
        nbytes = unit.block.data.size
        reason = f"{nbytes} bytes exceed the NATS server's limit (its max_payload is {self._max_bytes})"
        logger.warning("%s: a message of %s is lost: %s", self._key, unit.tag, reason)
        time_ns = int(unit.block.times_ns[0])
        unit.lost = Lost(unit.device, first, last, len(unit.block), nbytes, time_ns, reason)
        unit.block, unit.steps = unit.block.part(0, 0), unit.steps[:0]
        unit.block.data = unit.block.data[:0]
        unit.folded, unit.described = [], {}
        yield unit

    def _publish(self, unit: Publication) -> None:
        with self._lock:
            number = self._published
            self._published += 1
            self._unanswered.add(number)
        future = self._connection.start(self._send(unit.subject, unit.encode(), unit.message_id))

        def answered(done: concurrent.futures.Future[Any]) -> None:
            self._answered(number, done)

        future.add_done_callback(answered)

    async def _send(self, subject: str, payload: bytes, message_id: str) -> None:
        answer = await self._connection.jetstream.publish(
            subject,
            payload,
            timeout=REQUEST_SEC,
            stream=self._connection.server.stream,
            headers={ID_HEADER: message_id},
        )
        self._connection.note_stored(answer.seq)

    def _answered(self, number: int, done: concurrent.futures.Future[Any]) -> None:
        error = done.exception() if not done.cancelled() else TimeoutError("the connection was closed")
        if error is None:
            with self._lock:
                self._unanswered.discard(number)
            try:
                self._acknowledge()
            except StreamRefusedError as refused:
                self._error = refused
            except OSError as failed:
                # Of the spool. A future only logs what its callbacks raise: the sender would not learn of it.
                self._error = TransportError(f"a stored part cannot be removed from the spool: {failed}")
        elif self._error is None:
            self._error = self._connection.translated(error)

    def _acknowledge(self) -> None:
        position: StreamOffset | None = None
        with self._lock:
            first = min(self._unanswered, default=self._published)
            while self._on_way and self._on_way[0][1] <= first:
                position = self._on_way.popleft()[0]
            if position is None or self._closed:
                return
        self._on_ack(position)


def make_transport(options: Forward) -> Transport:
    """See `transport` of `hostcallback.receiver.remote.brokers.Broker`."""
    server = NatsServer(
        url=options.address, token=options.token, tls_ca=options.tls_ca, tls_cert=options.tls_cert,
        tls_key=options.tls_key, insecure=options.insecure,
    )  # fmt: skip
    return NatsTransport(server, options.folder)


def make_service(source: CollectFrom, store: Store, on_grown: Grown) -> CollectingService:
    """See `service` of `hostcallback.receiver.remote.brokers.Broker`. Collectors of the same run share the messages."""
    server = NatsServer(url=source.url, token=source.token, tls_ca=source.tls_ca, insecure=source.insecure)
    durable = f"hcb-collect-{token(source.run)}" if source.run else "hcb-collect"
    return NatsCollector(store, server, durable=durable, run=source.run, on_grown=on_grown)
