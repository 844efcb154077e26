"""Fetches what processes published to JetStream, stores it, and only then says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from receiver.log import logger
from receiver.remote.collector.store import Store
from receiver.remote.errors import BadStreamError, LinkError
from receiver.remote.nats.connection import REQUEST_SEC, NatsConnection, NatsServer
from receiver.remote.nats.publication import Publication
from receiver.remote.nats.store import NatsStore
from receiver.remote.nats.subjects import subject_of_run
from receiver.remote.streams import StreamKey, StreamOffset

FETCH = 128
FETCH_SEC = 0.5
HOLD_SEC = 2.0
"""For so long a collector waits for the rest of a batch, of which another one may have it."""

ACK_SEC = 15.0
"""What a collector has not acknowledged by then goes to another one."""

RETRY_SEC = 0.5


@dataclass(slots=True)
class _Batch:
    # Units of one batch of a device by their part, whether one came again, and where to say that they are stored.
    since: float
    parts: int
    units: dict[tuple[int, str], Publication] = field(default_factory=dict)
    again: bool = False
    replies: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.units) >= self.parts


class NatsCollector:
    """A member of a queue group: of a durable consumer of JetStream each gets some of the messages. One thread.

    Attributes:
        stop: set to end it.
    """

    def __init__(
        self,
        store: Store,
        server: NatsServer,
        *,
        durable: str,
        run: str = "",
        on_grown: Callable[[StreamKey, StreamOffset], None] = lambda key, position: None,
    ) -> None:
        """Makes ready.

        Args:
            store: has the folder.
            server: where JetStream is.
            durable: the name of the consumer: collectors with the same one share the messages.
            run: only of this run; of all for the empty text.
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
        self.stop = threading.Event()

    def serve(self, on_connected: Callable[[], None] = lambda: None) -> None:
        """Fetches and stores until `stop` is set, whatever becomes of the server meanwhile."""
        said = connected = False
        while not self.stop.is_set():
            try:
                if self._subscription is None:
                    self._subscribe()
                    if said:
                        logger.warning("NATS is back")
                    if not connected:
                        on_connected()
                    said, connected = False, True
                self._take(self._fetch())
            except LinkError as error:
                self._subscription = None
                if not said:
                    said = True
                    logger.warning("nothing can be fetched at present: %s; it is tried again", error)
                self.stop.wait(RETRY_SEC)
            except Exception:  # whatever it is, what is not acknowledged comes again
                logger.exception("something is wrong with what NATS brings")
                self._subscription = None
                self._batches.clear()
                self._replies.clear()
                self.stop.wait(RETRY_SEC)
        try:
            self._write_due(everything=True)
            self._acknowledge()
        except LinkError as error:
            logger.warning("what was stored last may come again: %s", error)
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
            except BadStreamError as error:
                logger.warning("a message at %s is no tap's, and left out: %s", message.subject[:200], error)
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
        for key, batch in sorted(self._batches.items(), key=lambda item: item[0][2]):
            if everything or batch.is_whole or batch.since < late:
                del self._batches[key]
                try:
                    self._write(batch)
                except OSError as error:
                    # Nobody says that it is stored: it comes again.
                    logger.error("messages of %s cannot be stored: %s", key[0], error)
                    self.stop.wait(RETRY_SEC)

    def _write(self, batch: _Batch) -> None:
        new = [unit for unit in batch.units.values() if not self._store.has(unit, again=batch.again)]
        if new:
            key, position = self._store.append(new)
            self._on_grown(key, position)
        self._replies += batch.replies

    def _acknowledge(self) -> None:
        # By whatever connection there is: that one by which a message came may have ended.
        replies = self._replies
        if not replies:
            return

        async def acknowledge() -> None:
            for reply in replies:
                await self._connection.client.publish(reply, b"+ACK")
            await self._connection.client.flush(REQUEST_SEC)

        self._connection.wait(acknowledge(), 2 * REQUEST_SEC)
        self._replies = []
