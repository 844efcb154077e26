"""The one dispatcher: decodes a frame, finds its consumer, calls its sink, defers what goes wrong."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

from receiver.consumer import Consumer
from receiver.errors import TapFailure
from receiver.message import Message
from receiver.registry import Registry
from receiver.scope import Scope
from receiver.source import Frame
from receiver.wire import Decoder, Flags, WireError

_END = int(Flags.END_OF_STREAM)


class Dispatcher:
    """Delivers the frames of one device, in order, on that device's receiver thread.

    Attributes:
        scope: accounts for what is delivered now; set by the receiver thread between frames.
        current: the consumer whose sink runs now, or None. Read by other threads for reports.
        current_since: `perf_counter()` at which it began.
    """

    def __init__(self, registry: Registry, device_name: str, device: Any, scope: Scope) -> None:
        """`device` is what tap functions get as `device`; `device_name` is for reports."""
        self._find = registry.find
        self._decode = Decoder().decode
        self._device_name = device_name
        self._device = device
        self._expected_seq = 0
        self.current: Consumer | None = None
        self.current_since = 0.0
        self.enter(scope)

    def enter(self, scope: Scope) -> None:
        """Accounts to `scope` from the next frame on."""
        self.scope = scope
        self._stats = scope.device_stats(self._device_name)

    def deliver(self, frame: Frame) -> int | None:
        """Delivers one frame; what its sink raises is deferred, never raised here.

        Returns:
            The token of an END_OF_STREAM frame, otherwise None.
        """
        try:
            consumer_id, flags, seq, time_ns, run_id, _, arrays = self._decode(*frame)
        except WireError as error:
            self.lose(f"undecodable frame on {self._device_name}: {error}", 1)
            return None
        stats = self._stats
        if seq != self._expected_seq:
            stats.dropped += seq - self._expected_seq
        self._expected_seq = seq + 1
        if flags & _END:
            return consumer_id
        consumer = self._find(consumer_id)
        if consumer is None:
            stats.unknown += 1
            self.scope.deferred.add_unknown(consumer_id)
            return None
        for array in arrays:
            stats.delivered_bytes += array.nbytes
        self.current_since = started = perf_counter()
        self.current = consumer
        try:
            consumer.sink(Message(consumer, arrays, seq, time_ns, run_id, self._device))
        except BaseException as error:  # a tap's failure, whatever it is, must not stop the stream
            stats.failed += 1
            self._defer(error, consumer, seq)
        self.current = None
        stats.tap_sec += perf_counter() - started
        stats.delivered += 1
        stats.last_time_ns = time_ns
        if not stats.first_time_ns:
            stats.first_time_ns = time_ns
        return None

    def lose(self, reason: str, count: int) -> None:
        """Accounts for messages that can never be delivered."""
        self.scope.deferred.add_lost(reason, count)

    def _defer(self, error: BaseException, consumer: Consumer, seq: int) -> None:
        error.__traceback__ = _without_receiver_frames(error.__traceback__)
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


def _without_receiver_frames(traceback: TracebackType | None) -> TracebackType | None:
    # The traceback begins in this package; the reader wants their own code.
    while traceback is not None and traceback.tb_next is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("receiver."):
            break
        traceback = traceback.tb_next
    return traceback
