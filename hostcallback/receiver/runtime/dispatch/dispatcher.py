"""The dispatcher: decodes frames, finds their consumers, calls the sinks and defers their errors.

Recording, forwarding and delivering are readers of one stream. The receiver thread hands each batch to the batch sinks
before it delivers the messages. If that delivery takes long, a thread of `BatchFeed` copies the frames that have come
meanwhile out of the source and hands these on: so a message is recorded soon after it was emitted, however slow the
taps are. The receiver thread then leaves out the frames that were handed on already. Memory stays bounded, because the
copies go to the sinks at once and the frames stay in the source until they are delivered.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any

from hostcallback.receiver.errors import WireError
from hostcallback.receiver.failures.deferred_errors import about, failure_of
from hostcallback.receiver.failures.explanation import CheckFailed
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import ArraysSink, Consumer, Find, Message, Registry
from hostcallback.receiver.runtime.dispatch.calls import Calls
from hostcallback.receiver.runtime.dispatch.gil_share import GilThrottle
from hostcallback.receiver.runtime.dispatch.scope import BatchSink, Link, Scope, ScopeSinks, SinkChain
from hostcallback.receiver.runtime.stats import TapCounters
from hostcallback.receiver.sources.ring_batch import BatchDecoder, DecodedBatch, seq_of
from hostcallback.receiver.sources.source import Batch, CopiedBatch, Frame, Source
from hostcallback.receiver.wire.frame import Flags, decode_header
from hostcallback.receiver.wire.truncation import split_truncated

LOOK_SEC = 0.01
"""Seconds between the thread's checks of the running delivery, and the duration from which a delivery is long."""

REST_SEC = 1.0
"""Seconds without a delivery after which the thread sleeps until the next one begins."""

_NONE = -1


class BatchFeed:
    """Hands each frame of one device to the batch sinks once, in order. The receiver thread calls it.

    Attributes:
        sinks: the batch sinks of the current scope.
    """

    def __init__(self, device_name: str, source: Source | None, find: Find) -> None:
        """Makes the feed of one device.

        Args:
            device_name: the device's name, for the sinks.
            source: the source that frames are copied from while a delivery takes long; None copies none.
            find: finds the consumer of an id, for the sinks.
        """
        self.sinks: tuple[BatchSink, ...] = ()
        self._device_name = device_name
        self._source = source
        self._find = find
        # Protects everything below. The sinks are called with it, so that batches stay in order.
        self._lock = threading.Lock()
        self._next_seq = 0
        self._ahead: list[int] = []  # sequence numbers handed on that the reader has not read yet
        self._delivering_since: float | None = None
        self._wanted = threading.Event()
        self._at_end = False  # whether the reader delivers an END_OF_STREAM frame
        self._thread: threading.Thread | None = None
        self._stopping = False

    def take(self, batch: Batch, last_seq: int) -> None:
        """Hands on a batch that the reader has read, without the frames that were handed on before. Does not raise.

        Args:
            batch: the frames.
            last_seq: the sequence number of the last one; negative if it is unknown.
        """
        # Without the lock: without sinks no thread copies ahead, and the receiver thread alone changes
        # `sinks`.
        if not self.sinks and not self._ahead:
            self._next_seq = _NONE if last_seq < 0 else last_seq + 1
            return
        with self._lock:
            rest = self._rest(batch) if self._ahead else batch
            if rest is not None:
                self._hand_on(rest, last_seq)
            self._at_end = batch.count == 1 and _is_end(batch.frames[0])

    def lose(self, count: int, reason: str) -> None:
        """Tells the sinks that messages were lost before they could be read."""
        with self._lock:
            self._next_seq = _NONE  # the gap that they leave is not a drop
            for sink in self.sinks:
                sink.lose(self._device_name, count, reason)

    @contextmanager
    def while_delivering(self) -> Iterator[None]:
        """Lets the thread copy frames out of the source if the block takes long."""
        # The delivery of an END_OF_STREAM frame changes the scope: the frames behind it belong to other sinks.
        if not self.sinks or self._source is None or self._at_end:
            yield
            return
        if self._thread is None:
            self._start()
        # Without the lock: the copying thread only reads it, and looks at it again under the lock before it
        # copies.
        self._delivering_since = perf_counter()
        self._wanted.set()
        try:
            yield
        finally:
            # Takes the lock, because the reader must not read on while frames are copied: their order would be lost.
            with self._lock:
                self._delivering_since = None

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        self._stopping = True
        self._wanted.set()

    def _hand_on(self, batch: Batch, last: int) -> None:
        expected, dropped = self._next_seq, 0
        if last < 0:
            self._next_seq = _NONE
        else:
            if expected != _NONE:
                dropped = max(0, last + 1 - expected - batch.count - sum(batch.folded))
            self._next_seq = last + 1
        for sink in self.sinks:
            sink.record_batch(
                self._device_name,
                batch,
                self._find,
                dropped=dropped,
                first_seq=max(0, expected),
                last_seq=max(0, last),
            )

    def _rest(self, batch: Batch) -> Batch | None:
        # The frames of the batch that were not handed on ahead; None if all were.
        seqs = [seq_of(frame) for frame in batch.frames]
        first = next((place for place, seq in enumerate(seqs) if seq == _NONE or seq >= self._next_seq), None)
        last = seqs[-1] if first is None else max(seqs[first], self._next_seq - 1)
        done, self._ahead = self._ahead, self._ahead[bisect_right(self._ahead, last) :]
        if first is None:
            return None
        folded = list(batch.folded[first:])
        if folded and folded[0]:
            # Failures of a check stand in the source one by one; some of those before this frame were handed on.
            before = seqs[first - 1] if first else _NONE
            folded[0] -= min(folded[0], bisect_left(done, seqs[first]) - bisect_right(done, before))
        if not first and not (folded and folded[0] != batch.folded[0]):
            return batch
        return CopiedBatch(batch.frames[first:], folded if any(folded) else ())

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name=f"hostcallback-ahead-{self._device_name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        last = perf_counter()
        while not self._stopping:
            # An idle device must cost no wake-ups, but one that delivers must not pay for a wake-up per batch
            # either.
            if perf_counter() - last > REST_SEC:
                self._wanted.wait()
            self._wanted.clear()
            time.sleep(LOOK_SEC)
            since, now = self._delivering_since, perf_counter()
            if since is not None:
                last = now
                if now - since >= LOOK_SEC:
                    try:
                        while self._copy():
                            pass
                    except Exception:  # the receiver thread still hands on every batch
                        logger.exception(
                            "messages of %s are recorded only as they are delivered", self._device_name
                        )
                        self._source = None
                        return
            elif self._wanted.is_set():
                last = now

    def _copy(self) -> bool:
        with self._lock:
            # The delivery may have ended since `_run` looked: then the reader may read, and copying would mix
            # up the order.
            if self._delivering_since is None or self._source is None or not self.sinks:
                return False
            batch = self._source.copy_ahead()
            if batch is None:
                return False
            seqs = [seq_of(frame) for frame in batch.frames]
            self._ahead += seqs
            self._hand_on(batch, seqs[-1])
            return True


def _is_end(frame: Frame) -> bool:
    memory, offset, _ = frame
    try:
        return bool(decode_header(memory, offset).flags & Flags.END_OF_STREAM)
    except WireError:  # the decoder reports it when the frame is delivered
        return False


_END = int(Flags.END_OF_STREAM)
_CALL = int(Flags.CALL)
_UNUSUAL = int(Flags.END_OF_STREAM | Flags.TRUNCATED)
_ANY_SEQ = -1
_tuple_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class Dispatcher:
    """Delivers the frames of one device, in order, on that device's receiver thread.

    Attributes:
        device: object that tap functions get as `device`.
        scope: scope that counts the messages delivered now; `set_scope` changes it between frames.
        current: consumer whose sink runs now, or None. Other threads read it for reports.
        current_since: `perf_counter()` value at which that sink began.
        upcoming: consumer whose sink runs after the pause that the thread makes, or None. For reports too.
        feed: hands batches to the batch sinks of the scope.
        tap_counters: the counters of each tap; None while no client wants them.
        delivered: number of messages of the current batch that were delivered.
        skips: whether messages are left out instead of delivered, from the next one on: the user has interrupted the
            program. Recorders and forwarders still get them. Calls are answered.
    """

    def __init__(
        self,
        registry: Registry,
        device_name: str,
        device: Any,
        scope: Scope,
        on_end: Callable[[int], None],
        calls: Calls,
        *,
        source: Source | None = None,
    ) -> None:
        """Makes the dispatcher of one device.

        Args:
            registry: consumer ids to consumers.
            device_name: name of the device in reports.
            device: object that tap functions get as `device`.
            scope: the first scope.
            on_end: called with the token of each END_OF_STREAM frame, in its place among the messages.
            calls: gets the messages for whose replies a program waits.
            source: source from which the batch sinks get frames while a delivery takes long; None copies none.
        """
        self._registry = registry
        self._chain = SinkChain(registry.find)
        self.tap_counters: TapCounters | None = None
        self._observers: tuple[ScopeSinks, ...] = ()
        self._decoder = BatchDecoder(self._lose)
        self._device_name = device_name
        self.device = device
        self._on_end = on_end
        self._calls = calls
        self._expected_seq = 0
        self._folded: dict[int, int] = {}
        self.current: Consumer | None = None
        self.upcoming: Consumer | None = None
        self.current_since = 0.0
        self.delivered = 0
        self.skips = False
        self.feed = BatchFeed(device_name, source, registry.find)
        self.set_scope(scope)

    def count_taps(self, on: bool) -> None:
        """Begins or ends counting per tap, from the next batch on. Any thread."""
        self.tap_counters = TapCounters() if on else None
        self._make_chain()

    def observe(self, observers: tuple[ScopeSinks, ...]) -> None:
        """Delivers the messages of every scope to `observers` too, from the next message on. Any thread."""
        self._observers = observers
        self._make_chain()

    def set_scope(self, scope: Scope) -> None:
        """Counts the messages in `scope` from the next frame on."""
        self.scope = scope
        self._stats = scope.device_stats(self._device_name)
        self.feed.sinks = scope.batch_sinks
        self._make_chain()

    def _make_chain(self) -> None:
        links: list[Link] = []
        if self.tap_counters is not None:
            links.append(self.tap_counters.link)
        if self.scope.message_sinks is not None:
            links.append(self.scope.message_sinks.link)
        links += [observer.link for observer in self._observers]
        self._chain = SinkChain(self._registry.find, links)

    def decode(self, batch: Batch) -> DecodedBatch:
        """Decodes a batch for `deliver` and hands it to the batch sinks. Undecodable frames count as lost."""
        found = self._decoder.decode(batch)
        folded = 0
        if batch.folded:
            folded = sum(batch.folded)
            counted = [place for place, count in enumerate(batch.folded) if count]
            headers = [decode_header(*batch.frames[place][:2]) for place in counted]
            self._folded = {
                header.seq: batch.folded[place] for header, place in zip(headers, counted, strict=True)
            }
        expected = self._expected_seq
        if found.last_seq < 0:
            self._expected_seq = _ANY_SEQ
        else:
            if expected != _ANY_SEQ:
                dropped = found.last_seq + 1 - expected - batch.count - folded
                self._stats.dropped += max(0, dropped)  # a damaged header may hold any number
            self._expected_seq = found.last_seq + 1
        # Before the delivery: a recorded message stays recorded if its tap function kills the process.
        self.feed.take(batch, found.last_seq)
        return found

    def deliver(self, found: DecodedBatch, share: GilThrottle | None = None) -> None:
        """Delivers the messages in order. Defers the errors of their sinks and never raises them.

        Args:
            found: the messages.
            share: throttle that yields the interpreter lock between messages; None never yields.
        """
        # This is the hottest Python loop of the package, so it keeps its state in local variables.
        find, device, stats = self._chain.find, self.device, self._stats
        nbytes = found.nbytes
        self.current_since = started = perf_counter()
        pause_at, paused = inf, 0.0
        if share is not None:
            share.begin_messages()
            pause_at = share.next_yield_at()
        # A stack stands at the place of its last message, so no message counts as delivered until the batch is.
        counts = 0 if found.stacked else 1
        index = -1
        consumer, found_id = None, 0
        for index, (consumer_id, flags, seq, time_ns, run_id, count, arrays) in enumerate(found.items):
            if consumer is None or consumer_id != found_id:
                consumer, found_id = find(consumer_id), consumer_id
            if consumer is None or flags & _UNUSUAL:
                if flags & _END:  # the only message of its batch
                    self._on_end(consumer_id)
                    return
                if consumer is None:
                    stats.unknown += count or 1
                    nbytes -= sum(array.nbytes for array in arrays)
                    self.scope.deferred.add_unknown(consumer_id)
                    if flags & _CALL:
                        self._calls.refuse(seq, consumer_id)
                    continue
                nbytes -= sum(array.nbytes for array in arrays[:1])
                try:
                    arrays = split_truncated(arrays, count)
                except WireError as error:
                    self._lose(error)
                    continue
            # Calls are never left out: their programs wait for the replies.
            if self.skips and not flags & _CALL:
                stats.dropped += count or 1
                continue
            self.delivered = index * counts
            self.current_since = now = perf_counter()
            if now > pause_at and share is not None:
                share.messages = index
                self.current, self.upcoming = None, consumer
                paused += share.yield_gil()
                pause_at = share.next_yield_at()
                self.current_since = perf_counter()
            self.current = consumer
            message: Message | None = None
            try:
                sink = consumer.sink
                if type(sink) is ArraysSink and not flags & _CALL:
                    sink.of_arrays(arrays)
                else:
                    message = _tuple_new(
                        Message, (consumer, arrays, seq, time_ns, run_id, device, None, count, None)
                    )
                    if flags & _CALL:
                        self._calls.start(message, self.scope)
                    else:
                        sink(message)
            # A failed check is an answer, not a failure of its function: it does not count as failed.
            except CheckFailed as failed:
                message = message or Message(consumer, arrays, seq, time_ns, run_id, device, None, count)
                folded = self._folded.pop(seq, 0)
                stats.delivered += folded
                if folded and self.tap_counters is not None:
                    self.tap_counters.count_folded(consumer_id, folded)
                with about(message):
                    self.scope.deferred.add_check(consumer, failed, self._device_name, 1 + folded)
            except BaseException as error:  # a failing tap must not stop the stream
                message = message or Message(consumer, arrays, seq, time_ns, run_id, device, None, count)
                stats.failed += count or 1
                with about(message):
                    self.scope.deferred.add_failure(failure_of(error, message, self._device_name))
            stats.delivered += count or 1
            stats.last_time_ns = time_ns
        self.current = self.upcoming = None
        if share is not None:
            share.messages = index + 1
        stats.delivered_bytes += nbytes
        stats.tap_sec += perf_counter() - started - paused
        if not stats.first_time_ns:
            stats.first_time_ns = found.first_time_ns

    def lose(self, reason: str, count: int) -> None:
        """Counts messages that were lost before delivery."""
        self._expected_seq = _ANY_SEQ  # the gap that they leave is not a drop
        self.scope.deferred.add_lost(reason, count)
        self.feed.lose(count, reason)

    def _lose(self, error: WireError) -> None:
        self.scope.deferred.add_lost(f"undecodable frame on {self._device_name}: {error}", 1)
