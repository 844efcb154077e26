"""The one dispatcher: decodes a frame, finds its consumer, calls its sink, defers what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from receiver.batch_decoder import BatchDecoder, Deliveries
from receiver.calls import Calls
from receiver.consumer import Consumer
from receiver.errors import TapFailure
from receiver.failed_checks import CheckFailed
from receiver.lock_share import SLICE_SEC, LockShare
from receiver.message import Message
from receiver.registry import Registry
from receiver.scope import Scope
from receiver.source import Batch
from receiver.wire import Flags, WireError

_END = int(Flags.END_OF_STREAM)
_CALL = int(Flags.CALL)
_ANY_SEQ = -1
_tuple_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class Dispatcher:
    """Delivers the frames of one device, in order, on that device's receiver thread.

    Attributes:
        scope: accounts for what is delivered now; changed between frames by `enter`.
        current: the consumer whose sink runs now, or None. Read by other threads for reports.
        current_since: `perf_counter()` at which it began.
        delivered: how many messages of what `deliver` works on it is through with.
    """

    def __init__(
        self,
        registry: Registry,
        device_name: str,
        device: Any,
        scope: Scope,
        on_end: Callable[[int], None],
        calls: Calls,
        share: LockShare,
    ) -> None:
        """Makes the dispatcher of one device.

        Args:
            registry: consumer ids to consumers.
            device_name: for reports.
            device: what tap functions get as `device`.
            scope: the first scope.
            on_end: called with the token of each END_OF_STREAM frame, in its place among the messages.
            calls: gets the messages that a program waits for the replies to.
            share: of the interpreter lock; kept to while messages are delivered.
        """
        self._find = registry.find
        self._decoder = BatchDecoder(self._lose)
        self._share = share
        self._device_name = device_name
        self._device = device
        self._on_end = on_end
        self._calls = calls
        self._expected_seq = 0
        self._folded: dict[int, int] = {}
        self.current: Consumer | None = None
        self.current_since = 0.0
        self.delivered = 0
        self.enter(scope)

    def enter(self, scope: Scope) -> None:
        """Accounts to `scope` from the next frame on."""
        self.scope = scope
        self._stats = scope.device_stats(self._device_name)

    def decode(self, batch: Batch) -> Deliveries:
        """Decodes a batch into what `deliver` takes; frames that cannot be decoded are accounted as lost."""
        found = self._decoder.decode(batch)
        self._folded = {}
        if batch.folded:
            folded = sum(batch.folded)
            if not found.lost:  # a frame that cannot be decoded puts an end to all counting
                self._folded = {
                    item[2]: count for item, count in zip(found.items, batch.folded, strict=True) if count
                }
        else:
            folded = 0
        if found.lost:
            self._expected_seq = _ANY_SEQ
        elif found.items:
            if self._expected_seq != _ANY_SEQ:
                self._stats.dropped += found.last_seq + 1 - self._expected_seq - batch.count - folded
            self._expected_seq = found.last_seq + 1
        return found

    def deliver(self, found: Deliveries) -> None:
        """Delivers the messages one after the other; what their sinks raise is deferred, never raised here."""
        # This is the hottest Python loop of the package: what can be a local variable is one.
        find, device, stats = self._find, self._device, self._stats
        nbytes = found.nbytes
        share = self._share
        self.current_since = started = now = perf_counter()
        look_at = now + SLICE_SEC
        for index, (consumer_id, flags, seq, time_ns, run_id, count, arrays) in enumerate(found.items):
            consumer = find(consumer_id)
            if consumer is None or flags & _END:
                if flags & _END:  # the only message of its batch
                    self._on_end(consumer_id)
                    return
                stats.unknown += count or 1
                nbytes -= sum(array.nbytes for array in arrays)
                self.scope.deferred.add_unknown(consumer_id)
                if flags & _CALL:
                    self._calls.refuse(seq, consumer_id)
                continue
            self.delivered = index
            self.current_since = now = perf_counter()
            if now > look_at:
                share.look()
                self.current_since = now = perf_counter()
                look_at = now + SLICE_SEC
            self.current = consumer
            try:
                message = _tuple_new(Message, (consumer, arrays, seq, time_ns, run_id, device, None, count))
                if flags & _CALL:
                    self._calls.start(message, self.scope)
                else:
                    consumer.sink(message)
            except CheckFailed as failed:
                folded = self._folded.pop(seq, 0)
                stats.delivered += folded
                self.scope.deferred.add_check(consumer, failed, self._device_name, 1 + folded)
            except BaseException as error:  # a tap's failure, whatever it is, must not stop the stream
                stats.failed += count or 1
                self._defer(error, consumer, seq)
            stats.delivered += count or 1
            stats.last_time_ns = time_ns
        self.current = None
        stats.delivered_bytes += nbytes
        stats.tap_sec += perf_counter() - started
        if not stats.first_time_ns and found.items:
            stats.first_time_ns = found.items[0][3]

    def lose(self, reason: str, count: int) -> None:
        """Accounts for messages that can never be delivered."""
        self._expected_seq = _ANY_SEQ  # the gap they leave is no drop
        self.scope.deferred.add_lost(reason, count)

    def _lose(self, error: WireError) -> None:
        self.lose(f"undecodable frame on {self._device_name}: {error}", 1)

    def _defer(self, error: BaseException, consumer: Consumer, seq: int) -> None:
        self.scope.deferred.add_failure(
            TapFailure(
                error,
                consumer.name,
                consumer.source_line,
                self._device_name,
                seq,
                consumer.transforms,
                consumer.kwargs,
            )
        )
