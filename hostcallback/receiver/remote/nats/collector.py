"""The collector of NATS JetStream: fetches publications, stores them in tap logs, and acknowledges only stored ones.

Each message is stored once, and a device's messages in order.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.errors import BadStreamError, NotATapLogError, TransportError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.collector.service import Grown
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.nats import connection, publication
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import NO_STEP, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.taplog.reading.reader import STREAM
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter

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
    units: dict[tuple[int, str], publication.Publication] = field(default_factory=dict)
    again: bool = False
    replies: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.units) >= self.parts


class NatsCollector:
    """A member of a queue group: each gets some messages of one durable consumer of JetStream. One thread.

    See `hostcallback.receiver.remote.collector.service.CollectingService`.
    """

    def __init__(
        self,
        store: Store,
        server: connection.NatsServer,
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
        self._connection = connection.NatsConnection(server)
        self._durable = durable
        self._subject = connection.subject_of_run(run)
        self._on_grown = on_grown
        self._subscription: Any = None
        self._batches: dict[tuple[StreamKey, str, int], _Batch] = {}
        self._replies: list[str] = []
        self._told = threading.Event()

    @property
    def where(self) -> str:
        """See `hostcallback.receiver.remote.collector.service.CollectingService`."""
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
        self._subscription = self._connection.wait(subscribing, 4 * connection.REQUEST_SEC)

    def _fetch(self) -> list[Any]:
        async def fetch() -> list[Any]:
            try:
                found: list[Any] = await self._subscription.fetch(FETCH, timeout=FETCH_SEC)
                return found
            except TimeoutError:
                return []

        found: list[Any] = self._connection.wait(fetch(), FETCH_SEC + 2 * connection.REQUEST_SEC)
        return found

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            self._connection.note_stored(message.metadata.sequence.stream)
            try:
                unit = publication.Publication.decode(message.data)
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
            await self._connection.client.flush(connection.REQUEST_SEC)

        self._connection.wait(acknowledge(), 2 * connection.REQUEST_SEC)
        self._replies = []


SEGMENT_BYTES = 64 << 20


class _Series:
    # Segments in which each device's messages are in order, as if one process had written them.

    def __init__(self, store: Store, key: StreamKey, writer: dict[str, Any]) -> None:
        self.key = StreamKey(key.run, key.process, uuid.uuid4().hex[:16])
        self.last: dict[str, int] = {}
        self.steps: dict[str, int] = {}  # the last one of each device
        self._folder = store.folder(key.run)
        self._permissions = store.permissions
        self._permissions.make_folder(self._folder)
        self._number = 0
        self._info = {**writer, "process": self.key.epoch, "run": key.run, STREAM: key.epoch}
        self.segment = self._next()

    def _next(self) -> SegmentWriter:
        self._number += 1
        path = self._folder / self.key.segment_name(self._number)
        return SegmentWriter(path, number=self._number, info=self._info, permissions=self._permissions)

    @property
    def position(self) -> StreamOffset:
        return StreamOffset(self._number, self.segment.nbytes)

    def rotate_if_due(self) -> None:
        if self.segment.nbytes >= SEGMENT_BYTES:
            self.segment.close()
            self.segment = self._next()


class NatsStore:
    """Writes publications into the logs of a collector's folder. One thread."""

    def __init__(self, store: Store) -> None:
        """Truncates the incomplete chunks that a killed collector left in the folder: JetStream delivers them again.

        Raises:
            OSError: a file cannot be truncated.
        """
        self._store = store
        for path in sorted(store.directory.glob("*/p*.hcblog")):
            _cut_off_torn(path)
        self._series: dict[StreamKey, _Series] = {}
        self._highest: dict[tuple[StreamKey, str], int] = {}

    def has(self, unit: publication.Publication, *, again: bool) -> bool:
        """Whether a publication is stored. `again`: JetStream delivered it before, to this collector or another."""
        known = unit.key, unit.device
        if known not in self._highest:
            self._highest[known] = max((c.last_seq for _, c in self._chunks(unit, Kind.FRAMES)), default=-1)
        if unit.lost is not None:
            return again and any(_is_note(chunk, unit) for _, chunk in self._chunks(unit, Kind.LOST))
        first = int(unit.block.seqs[0])
        if first > self._highest[known]:
            return False
        for segment, chunk in self._chunks(unit, Kind.FRAMES):
            if chunk.first_seq <= first <= chunk.last_seq:
                # The range of a chunk may have gaps, since each publication has the messages of one tap only.
                block, _ = read_frames(segment, chunk)
                if (block.seqs == np.uint64(first)).any():
                    return True
        return False

    def append(self, units: Sequence[publication.Publication]) -> tuple[StreamKey, StreamOffset]:
        """Stores publications of one device of one stream that are not stored yet; returns the log and its new end.

        Raises:
            OSError: they cannot be written.
        """
        first = units[0]
        key, device = first.key, first.device
        whole = [unit for unit in units if unit.lost is None]
        series = self._series.get(key)
        seqs = min((int(unit.block.seqs[0]) for unit in whole), default=-1)
        if series is None or (whole and seqs <= series.last.get(device, -1)):
            # Earlier messages came late, from a collector that died. A new series keeps each series in order.
            if series is not None:
                series.segment.close()
            series = self._series[key] = _Series(self._store, key, first.writer)
        if whole:
            self._append(series, device, whole)
        for unit in units:
            if unit.lost is not None:
                series.segment.lost(unit.lost)
        # Before the caller acknowledges: an acknowledged message exists nowhere else.
        if self._store.fsync:
            series.segment.sync()
        position = series.position
        series.rotate_if_due()
        return series.key, position

    def close(self) -> None:
        """Completes all segments."""
        for series in self._series.values():
            series.segment.close()
        self._series.clear()

    def _append(self, series: _Series, device: str, units: Sequence[publication.Publication]) -> None:
        block = FrameBlock.join([unit.block for unit in units])
        steps = np.concatenate([unit.steps for unit in units])
        if len(units) > 1:
            order = np.argsort(block.seqs, kind="stable")
            block, steps = publication.gathered(block, order), steps[order]
        described = {i: found for unit in units for i, found in unit.described.items()}
        folded = sorted(pair for unit in units for pair in unit.folded)
        last = int(block.seqs[-1])
        known = steps[steps != NO_STEP].tolist()
        # Without a step before them, readers take the messages for the first ones of the device, and so for the
        # beginning of their launch. The messages before may be in another series.
        first = int(block.seqs[0])
        begins = device not in series.last and units[0].begins and first == units[0].batch
        before = NO_STEP if not first or begins else series.steps.get(device, (known or [NO_STEP])[0])
        series.steps[device] = (known or [before])[-1]
        series.segment.frames(device, block, described, steps=steps, step_before=before, folded=folded)
        series.last[device] = last
        known = units[0].key, device
        self._highest[known] = max(self._highest.get(known, -1), last)

    def _chunks(self, unit: publication.Publication, kind: Kind) -> Iterator[tuple[SegmentReader, Chunk]]:
        # Stored chunks of the publication's device.
        folder = self._store.folder(unit.key.run)
        for path in sorted(folder.glob(f"p{unit.key.process:06d}-*")) if folder.is_dir() else []:
            segment = _opened(path)
            if segment is None:
                continue
            if segment.info.get(STREAM) == unit.key.epoch:
                for chunk in segment.chunks():
                    if not isinstance(chunk, Chunk) or chunk.kind is not kind or chunk.is_torn:
                        continue
                    if kind is Kind.LOST or segment.devices.get(chunk.stream) == unit.device:
                        yield segment, chunk
            segment.close()


def _opened(path: Path | os.PathLike[str]) -> SegmentReader | None:
    try:
        return SegmentReader(path)
    except (NotATapLogError, OSError):
        return None


def _cut_off_torn(path: Path) -> None:
    # Readers would take the complete messages of a torn chunk, and then the same messages that come again.
    segment = _opened(path)
    if segment is None:
        return
    if STREAM in segment.info and not segment.is_closed():
        for item in segment.chunks():
            if item.is_torn if isinstance(item, Chunk) else item.torn:
                os.truncate(path, item.offset)
    segment.close()


def _is_note(chunk: Chunk, unit: publication.Publication) -> bool:
    lost = unit.lost
    return lost is not None and (chunk.first_seq, chunk.last_seq, chunk.min_time_ns) == (
        lost.first_seq, lost.last_seq, lost.time_ns
    )  # fmt: skip
