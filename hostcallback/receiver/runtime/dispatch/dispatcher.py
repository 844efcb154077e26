"""The dispatcher: decodes frames, finds their consumers, calls the sinks and defers their errors."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any

from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.check_report import CheckFailed
from hostcallback.receiver.failures.deferred_errors import about
from hostcallback.receiver.messages import Consumer, Message, Registry
from hostcallback.receiver.runtime.dispatch.batch_feed import BatchFeed
from hostcallback.receiver.runtime.dispatch.calls import Calls
from hostcallback.receiver.runtime.dispatch.gil_share import GilThrottle
from hostcallback.receiver.runtime.dispatch.scope import Scope, ScopeSinks
from hostcallback.receiver.runtime.dispatch.sink_chain import Link, SinkChain, TapCounters
from hostcallback.receiver.sources.batch_decoder import BatchDecoder, DecodedBatch
from hostcallback.receiver.sources.source import Batch, Source
from hostcallback.receiver.wire import Flags, WireError, decode_header
from hostcallback.receiver.wire.truncation import split_truncated

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
        feed: hands batches to the batch sinks of the scope.
        delivered: number of messages of the current batch that were delivered.
        skips: whether messages are left out instead of delivered, from the next one on: the user has interrupted the
            program. Recorders and forwarders still get them. Calls are answered.
        skipped: number of messages that were left out.
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
        self._counters: TapCounters | None = None
        self._observers: tuple[ScopeSinks, ...] = ()
        self._decoder = BatchDecoder(self._lose)
        self._device_name = device_name
        self.device = device
        self._on_end = on_end
        self._calls = calls
        self._expected_seq = 0
        self._folded: dict[int, int] = {}
        self.current: Consumer | None = None
        self.current_since = 0.0
        self.delivered = 0
        self.skips = False
        self.skipped = 0
        self.feed = BatchFeed(device_name, source, registry.find)
        self.set_scope(scope)

    @property
    def tap_counters(self) -> TapCounters | None:
        """The counters of each tap; None while no client wants them."""
        return self._counters

    def count_taps(self, on: bool) -> None:
        """Begins or ends counting per tap, from the next batch on. Any thread."""
        self._counters = TapCounters() if on else None
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
        if self._counters is not None:
            links.append(self._counters.link)
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
        pause_at, paused = inf if share is None else share.next_yield_at(), 0.0
        # A stack stands at the place of its last message, so no message counts as delivered until the batch is.
        counts = 0 if found.stacked else 1
        for index, (consumer_id, flags, seq, time_ns, run_id, count, arrays) in enumerate(found.items):
            consumer = find(consumer_id)
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
                self.skipped += count or 1
                stats.dropped += count or 1
                continue
            self.delivered = index * counts
            self.current_since = now = perf_counter()
            if now > pause_at and share is not None:
                paused += share.yield_gil()
                pause_at = share.next_yield_at()
                self.current_since = perf_counter()
            self.current = consumer
            try:
                message = _tuple_new(
                    Message, (consumer, arrays, seq, time_ns, run_id, device, None, count, None)
                )
                if flags & _CALL:
                    self._calls.start(message, self.scope)
                else:
                    consumer.sink(message)
            # A failed check is an answer, not a failure of its function: it does not count as failed.
            except CheckFailed as failed:
                folded = self._folded.pop(seq, 0)
                stats.delivered += folded
                if folded and self._counters is not None:
                    self._counters.count_folded(consumer_id, folded)
                with about(message):
                    self.scope.deferred.add_check(consumer, failed, self._device_name, 1 + folded)
            except BaseException as error:  # a failing tap must not stop the stream
                stats.failed += count or 1
                self._defer(error, message)
            stats.delivered += count or 1
            stats.last_time_ns = time_ns
        self.current = None
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

    def _defer(self, error: BaseException, message: Message) -> None:
        consumer = message.consumer
        failure = TapFailure(
            error,
            consumer.name,
            consumer.source_line,
            self._device_name,
            message.seq,
            consumer.transforms,
            consumer.kwargs,
            message.run_id,
        )
        with about(message):
            self.scope.deferred.add_failure(failure)
