"""Statistics of a receiver: by device, with their summary as a text table, and by tap."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hostcallback.receiver.messages import Consumer, Message, Sink
from hostcallback.receiver.text import preformatted, table, text_table

if TYPE_CHECKING:
    from hostcallback.receiver.sinks.time_rows import TimeRow


@dataclasses.dataclass(slots=True)
class DeviceStats:
    """Counts of one device's receiver within one scope.

    Attributes:
        device: the device's name, such as `cpu:0`.
        delivered: messages handed to their tap function (also those whose tap raised).
        delivered_bytes: bytes of the tapped arrays in those messages.
        dropped: messages a back-pressure policy dropped.
        failed: delivered messages whose tap function raised.
        unknown: messages for consumer ids that were not registered.
        unrecorded: messages that the receiver's recorder could not write.
        tap_sec: seconds spent in tap functions.
        queued_messages: messages in the device's queue at the time of the snapshot; 0 once the receiver is closed.
        queued_bytes: bytes of the queued messages.
        waiting_emissions: emissions that waited for room at the time of the snapshot.
        first_time_ns: Unix time at which the first message was emitted; 0 for none.
        last_time_ns: Unix time at which the last message was emitted; 0 for none.
    """

    device: str
    delivered: int = 0
    delivered_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    unknown: int = 0
    unrecorded: int = 0
    tap_sec: float = 0.0
    queued_messages: int = 0
    queued_bytes: int = 0
    waiting_emissions: int = 0
    first_time_ns: int = 0
    last_time_ns: int = 0

    @property
    def messages_per_sec(self) -> float:
        """Messages divided by the seconds from the first emission to the last; 0 for fewer than two messages."""
        span = (self.last_time_ns - self.first_time_ns) * 1e-9
        return self.delivered / span if span > 0 else 0.0

    def add(self, other: DeviceStats) -> None:
        """Adds another row's counts to this row."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def subtract(self, other: DeviceStats) -> None:
        """Reverses `add`."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) - getattr(other, name))

    def _repr_html_(self) -> str:
        return StatsRows([self])._repr_html_()

    def copy(self) -> DeviceStats:
        """Returns a copy."""
        return dataclasses.replace(self)


_COUNTS = ("delivered", "delivered_bytes", "dropped", "failed", "unknown", "unrecorded", "tap_sec")


class ShownAsSummary:
    """Shows an object by its summary: as text, and in notebooks as HTML."""

    def summary(self) -> str:
        """Returns the statistics as a text table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return preformatted(self.summary())


HEAD = ("device", "messages", "bytes", "rate", "dropped", "failed", "time in taps")


def _texts(row: DeviceStats) -> tuple[str, ...]:
    return (
        row.device, f"{row.delivered:,}", _bytes(row.delivered_bytes), f"{row.messages_per_sec:,.0f}/s",
        f"{row.dropped:,}", f"{row.failed:,}", f"{row.tap_sec:.3f} s",
    )  # fmt: skip


class StatsRows(list[DeviceStats]):
    """The rows of a receiver; a table in notebooks."""

    @property
    def times(self) -> dict[str, list[TimeRow]]:
        """The times of places in this process so far (`observe(what="time")`), by the name of the tap."""
        from hostcallback.receiver.sinks.times import times_by_tap  # here, because few processes have any

        return {name: times.rows() for name, times in list(times_by_tap.items())}

    def _repr_html_(self) -> str:
        return table(HEAD, map(_texts, self))


def summarize(name: str, stats: Sequence[DeviceStats]) -> str:
    """Returns a text table with one line per device that had messages."""
    title = f"receiver {name!r}" if name else "receiver"
    active = [s for s in stats if s.delivered or s.dropped or s.unknown]
    if not active:
        return f"{title}: no messages"
    lines = text_table(HEAD, [_texts(row) for row in active], left=())
    unknown = sum(s.unknown for s in active)
    if unknown:
        lines.append(f"{unknown:,} message(s) for unknown consumers")
    unrecorded = sum(s.unrecorded for s in active)
    if unrecorded:
        lines.append(f"{unrecorded:,} message(s) could not be recorded")
    return "\n".join([title, *lines])


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


@dataclasses.dataclass(slots=True)
class TapCounts:
    """Counts of one tap on one device since counting began.

    Attributes:
        messages: messages that its function was called with, alone or in stacks.
        nbytes: bytes of their arrays.
        failed: invocations that raised; for a check, its failures.
        tap_sec: seconds in its function.
    """

    messages: int = 0
    nbytes: int = 0
    failed: int = 0
    tap_sec: float = 0.0


class _Counter:
    def __init__(self, consumer: Consumer, sink: Sink) -> None:
        self.consumer = consumer
        self.counts = TapCounts()
        self._sink = sink
        self._lock = threading.Lock()  # protects the counts: calls run on several threads

    def __call__(self, message: Message) -> Any:
        started = perf_counter()
        failed = 1
        try:
            result = self._sink(message)
            failed = 0
            return result
        finally:
            seconds = perf_counter() - started
            with self._lock:
                self.counts.messages += message.stacked or 1
                self.counts.nbytes += sum(array.nbytes for array in message.arrays)
                self.counts.failed += failed
                self.counts.tap_sec += seconds

    def follow(self, sink: Sink) -> None:
        self._sink = sink  # the sink in another scope

    def fold(self, count: int) -> None:
        with self._lock:
            self.counts.messages += count
            self.counts.failed += count

    def copy(self) -> TapCounts:
        with self._lock:
            return dataclasses.replace(self.counts)


class TapCounters:
    """The counters of all taps of one device. The receiver thread calls `link`; any thread may call the rest."""

    def __init__(self) -> None:
        """Starts without counters."""
        self._counters: dict[int, _Counter] = {}

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """Returns a sink that counts and calls `sink`, the rest of the consumer's chain."""
        counter = self._counters.get(consumer.consumer_id)
        if counter is None or counter.consumer is not consumer:
            counter = self._counters[consumer.consumer_id] = _Counter(consumer, sink)
        else:
            counter.follow(sink)
        return counter

    def count_folded(self, consumer_id: int, count: int) -> None:
        """Adds failures of a check that were folded into its last message."""
        self._counters[consumer_id].fold(count)

    def snapshot(self) -> list[tuple[Consumer, TapCounts]]:
        """Returns each tap's consumer with a copy of its counts."""
        # A copy of the table: the receiver thread adds to it meanwhile.
        return [(counter.consumer, counter.copy()) for counter in list(self._counters.values())]
