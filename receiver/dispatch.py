"""The one dispatcher: decodes a frame, finds its consumer, calls its sink, defers what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from receiver.calls import Calls
from receiver.consumer import Consumer
from receiver.errors import TapFailure
from receiver.failed_checks import CheckFailed
from receiver.message import Message
from receiver.registry import Registry
from receiver.scope import Scope
from receiver.source import Frame
from receiver.wire import Decoded, Decoder, Flags, WireError

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
        delivered: how many messages of the list that `deliver` works on it is through with.
    """

    def __init__(
        self,
        registry: Registry,
        device_name: str,
        device: Any,
        scope: Scope,
        on_end: Callable[[int], None],
        calls: Calls,
    ) -> None:
        """Makes the dispatcher of one device.

        Args:
            registry: consumer ids to consumers.
            device_name: for reports.
            device: what tap functions get as `device`.
            scope: the first scope.
            on_end: called with the token of each END_OF_STREAM frame, in its place among the messages.
            calls: gets the messages that a program waits for the replies to.
        """
        self._find = registry.find
        self._decode = Decoder().decode
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

    def decode(self, frames: Sequence[Frame]) -> list[Decoded]:
        """Decodes frames into what `deliver` takes; those that cannot be decoded are accounted as lost."""
        decode = self._decode
        try:
            return [decode(memory, offset, external) for memory, offset, external in frames]
        except WireError:
            decoded = []
            for frame in frames:
                try:
                    decoded.append(decode(*frame))
                except WireError as error:
                    self.lose(f"undecodable frame on {self._device_name}: {error}", 1)
            return decoded

    def fold(self, messages: Sequence[Decoded], folded: Sequence[int]) -> None:
        """Notes how many failures of the same check each message stands for beside its own, before `deliver`."""
        if len(messages) == len(folded):  # a frame that cannot be decoded puts an end to all counting
            self._folded = {
                message[2]: count for message, count in zip(messages, folded, strict=True) if count
            }

    def deliver(self, messages: Sequence[Decoded]) -> None:
        """Delivers the messages one after the other; what their sinks raise is deferred, never raised here."""
        # This is the hottest Python loop of the package: what can be a local variable is one.
        find, device, stats = self._find, self._device, self._stats
        nbytes = 0
        self.current_since = started = perf_counter()
        for index, (consumer_id, flags, seq, time_ns, run_id, _, arrays) in enumerate(messages):
            self.delivered = index
            if seq != self._expected_seq and self._expected_seq != _ANY_SEQ:
                stats.dropped += seq - self._expected_seq - self._folded.get(seq, 0)
            self._expected_seq = seq + 1
            consumer = find(consumer_id)
            if flags & _END:
                now = perf_counter()
                stats.tap_sec += now - started
                stats.delivered_bytes += nbytes
                self._on_end(consumer_id)
                stats, nbytes, started = self._stats, 0, now
                continue
            if consumer is None:
                stats.unknown += 1
                self.scope.deferred.add_unknown(consumer_id)
                if flags & _CALL:
                    self._calls.refuse(seq, consumer_id)
                continue
            for array in arrays:
                nbytes += array.nbytes
            self.current_since = perf_counter()
            self.current = consumer
            try:
                message = _tuple_new(Message, (consumer, arrays, seq, time_ns, run_id, device, None))
                if flags & _CALL:
                    self._calls.start(message, self.scope)
                else:
                    consumer.sink(message)
            except CheckFailed as failed:
                folded = self._folded.pop(seq, 0)
                stats.delivered += folded
                self.scope.deferred.add_check(consumer, failed, self._device_name, 1 + folded)
            except BaseException as error:  # a tap's failure, whatever it is, must not stop the stream
                stats.failed += 1
                self._defer(error, consumer, seq)
            stats.delivered += 1
            stats.last_time_ns = time_ns
            if not stats.first_time_ns:
                stats.first_time_ns = time_ns
        self.current = None
        stats.delivered_bytes += nbytes
        stats.tap_sec += perf_counter() - started

    def lose(self, reason: str, count: int) -> None:
        """Accounts for messages that can never be delivered."""
        self._expected_seq = _ANY_SEQ  # the gap they leave is no drop
        self.scope.deferred.add_lost(reason, count)

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
