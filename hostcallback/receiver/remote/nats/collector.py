"""The collector of NATS JetStream: fetches publications, stores them, and acknowledges only stored ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.collector.services import Grown
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.credentials import BadStreamError, TransportError
from hostcallback.receiver.remote.nats.connection import (
    REQUEST_SEC,
    NatsConnection,
    NatsServer,
    subject_of_run,
)
from hostcallback.receiver.remote.nats.publication import Publication
from hostcallback.receiver.remote.nats.store import NatsStore
from hostcallback.receiver.remote.streams import StreamKey

FETCH = 128
FETCH_SEC = 0.5
HOLD_SEC = 2.0
"""Seconds for which a collector holds an incomplete batch: another collector may have received the rest of it."""

ACK_SEC = 15.0
"""Seconds after which JetStream delivers unacknowledged messages again, to any collector."""

RETRY_SEC = 0.5


@dataclass(slots=True)
class _Batch:
    # Publications of one batch of a device, whether any was delivered before, and the subjects of their
    # acknowledgements.
    since: float
    parts: int
    units: dict[tuple[int, str], Publication] = field(default_factory=dict)
    again: bool = False
    replies: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.units) >= self.parts


class NatsCollector:
    """A member of a queue group: each gets some messages of one durable consumer of JetStream. One thread.

    See `hostcallback.receiver.remote.collector.services.CollectingService`.
    """

    def __init__(
        self,
        store: Store,
        server: NatsServer,
        *,
        durable: str,
        run: str = "",
        on_grown: Grown = lambda key, position: None,
    ) -> None:
        """Prepares the collector; `serve` connects.

        Args:
            store: stores the streams.
            server: the NATS server.
            durable: name of the durable consumer; collectors with the same name share the messages.
            run: fetches this run only; empty for all runs.
            on_grown: called when more of a stream is stored.

        Raises:
            HostCallbackError: the package nats-py is missing.
        """
        self._store = NatsStore(store)
        self._connection = NatsConnection(server)
        self._durable = durable
        self._subject = subject_of_run(run)
        self._on_grown = on_grown
        self._subscription: Any = None
        self._batches: dict[tuple[StreamKey, str, int], _Batch] = {}
        self._replies: list[str] = []
        self._told = threading.Event()

    @property
    def where(self) -> str:
        """See `hostcallback.receiver.remote.collector.services.CollectingService`."""
        return f"from {self._connection.server.shown}"

    def end(self) -> None:
        """Has `serve` return soon."""
        self._told.set()

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Fetches and stores until `end` is called. Reconnects if the server goes away."""
        said = connected = False
        while not self._told.is_set():
            try:
                if self._subscription is None:
                    self._subscribe()
                    if said:
                        logger.warning("the NATS server answers again")
                    if not connected:
                        on_ready()
                    said, connected = False, True
                self._take(self._fetch())
            except TransportError as error:
                self._subscription = None
                if not said:
                    said = True
                    logger.warning("nothing can be fetched at present: %s; the collector retries", error)
                self._told.wait(RETRY_SEC)
            except Exception:  # unacknowledged messages come again, so starting over loses none
                logger.exception("messages from NATS could not be processed")
                self._subscription = None
                self._batches.clear()
                self._replies.clear()
                self._told.wait(RETRY_SEC)
        try:
            self._write_due(everything=True)
            self._acknowledge()
        except TransportError as error:
            logger.warning("the messages stored last may be delivered again: %s", error)
        self._connection.close()
        self._store.close()

    def _subscribe(self) -> None:
        self._connection.open()
        api = self._connection.nats.js.api
        config = api.ConsumerConfig(
            ack_wait=ACK_SEC, max_ack_pending=8 * FETCH, deliver_policy=api.DeliverPolicy.ALL
        )
        subscribing = self._connection.jetstream.pull_subscribe(
            self._subject, durable=self._durable, stream=self._connection.server.stream, config=config
        )
        self._subscription = self._connection.wait(subscribing, 4 * REQUEST_SEC)

    def _fetch(self) -> list[Any]:
        async def fetch() -> list[Any]:
            try:
                found: list[Any] = await self._subscription.fetch(FETCH, timeout=FETCH_SEC)
                return found
            except TimeoutError:
                return []

        found: list[Any] = self._connection.wait(fetch(), FETCH_SEC + 2 * REQUEST_SEC)
        return found

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            self._connection.note_stored(message.metadata.sequence.stream)
            try:
                unit = Publication.decode(message.data)
            except (
                BadStreamError,
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
                MemoryError,
            ) as error:
                logger.warning(
                    "a message at %s is not a tap's, and was left out: %s", message.subject[:200], error
                )
                self._replies.append(message.reply)
                continue
            key = unit.key, unit.device, unit.batch
            batch = self._batches.setdefault(key, _Batch(time.monotonic(), unit.parts))
            batch.units[unit.part, unit.message_id] = unit
            batch.again |= message.metadata.num_delivered > 1
            batch.replies.append(message.reply)
        self._write_due()
        self._acknowledge()

    def _write_due(self, *, everything: bool = False) -> None:
        late = time.monotonic() - HOLD_SEC
        # In the order of their numbers, because the store keeps a device's messages in order.
        for key, batch in sorted(self._batches.items(), key=lambda item: item[0][2]):
            if everything or batch.is_whole or batch.since < late:
                del self._batches[key]
                try:
                    self._write(batch)
                except OSError as error:
                    # Not acknowledged, so it comes again.
                    logger.error("messages of %s cannot be stored: %s", key[0], error)
                    self._told.wait(RETRY_SEC)
                except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError):
                    # Acknowledged: it would come again, and fail again, and no other message would be stored.
                    logger.exception("messages of %s cannot be stored, and are left out", key[0])
                    self._replies += batch.replies

    def _write(self, batch: _Batch) -> None:
        new = [unit for unit in batch.units.values() if not self._store.has(unit, again=batch.again)]
        if new:
            key, position = self._store.append(new)
            # After the messages are stored, and before they are acknowledged: a crash in between repeats
            # them, and `has` finds them.
            self._on_grown(key, position)
        self._replies += batch.replies

    def _acknowledge(self) -> None:
        # Over the current connection: the one that brought a message may have ended.
        replies = self._replies
        if not replies:
            return

        async def acknowledge() -> None:
            for reply in replies:
                await self._connection.client.publish(reply, b"+ACK")
            await self._connection.client.flush(REQUEST_SEC)

        self._connection.wait(acknowledge(), 2 * REQUEST_SEC)
        self._replies = []
