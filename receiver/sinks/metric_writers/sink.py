"""The sink of a receiver's `writers=`: reduces the messages of metrics taps and hands the records to the writers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.metric_writers.adapters import as_record_writer
from hostcallback.receiver.sinks.metric_writers.record import MetricRecord
from hostcallback.receiver.sinks.metric_writers.reduction import TapReduction
from hostcallback.receiver.sinks.metric_writers.tap_layout import TapLayout
from hostcallback.receiver.sinks.metric_writers.writer_thread import WriterStats, WriterThread
from hostcallback.receiver.wire import tap_kind


class MetricsSink:
    """Takes the messages of metrics taps. Any thread."""

    only_kind = tap_kind.METRICS

    def __init__(self, writers: Sequence[Any]) -> None:
        """Prepares the writers.

        Raises:
            TypeError: one of them is no writer.
        """
        self._writers = [as_record_writer(writer) for writer in writers]
        self._threads: list[WriterThread] = []
        self._lock = threading.Lock()  # protects everything below; devices of a program share reductions
        self._taps: dict[int, tuple[Any, TapReduction]] = {}
        self._counts: dict[Any, Counter[str]] = {}

    @property
    def stats(self) -> list[WriterStats]:
        """What became of the records, per writer."""
        return [thread.stats for thread in self._threads]

    def open(self) -> None:
        """Opens the writers. If one cannot be opened, closes the others and raises its error."""
        opened: list[Any] = []
        try:
            for writer in self._writers:
                writer.open()
                opened.append(writer)
        except BaseException:
            for writer in opened:
                writer.close()
            raise
        self._threads = [WriterThread(writer) for writer in self._writers]

    def __call__(self, message: Message) -> None:
        """Takes a message, or a stack of messages, of a metrics tap."""
        with self._lock:
            consumer = message.consumer
            known = self._taps.get(consumer.consumer_id)
            describe = consumer.describe
            if describe is None:
                return
            if known is None or known[0] is not describe:  # each device has its own copy of the consumer
                if known is not None:
                    self._put(known[1].finish(partial=True))
                layout = TapLayout(describe())
                counts = self._counts.setdefault(layout.key, Counter())
                known = self._taps[consumer.consumer_id] = describe, TapReduction(layout, counts)
            self._put(known[1].take(message, consumer.devices))

    def _put(self, records: list[MetricRecord]) -> None:
        records = [record for record in records if not record.is_empty]
        if records:
            for thread in self._threads:
                thread.put(records)

    def flush(self, timeout_sec: float | None = None, look: Callable[[], None] | None = None) -> None:
        """Writes the records whose messages have all arrived, and has the writers flush.

        Args:
            timeout_sec: seconds that the writers have, together; None for as long as they write.
            look: called repeatedly while waiting; may raise to stop the wait.
        """
        self._finish(partial=False)
        left_sec = _seconds_left(timeout_sec)
        for thread in self._threads:
            thread.flush(left_sec(), look)

    def close(self, timeout_sec: float | None = None, idle_sec: float = inf) -> list[str]:
        """Writes everything and closes the writers. Returns a sentence per writer that lost something.

        Args:
            timeout_sec: seconds that the writers have, together; None for as long as they write.
            idle_sec: seconds without a record after which a writer is given up.
        """
        self._finish(partial=True)
        left_sec = _seconds_left(timeout_sec)
        for thread in self._threads:
            thread.close(left_sec(), idle_sec)
        return [_lost(row) for row in self.stats if row.failed or row.dropped]

    def backlog(self) -> list[str]:
        """Returns a text for each writer that has records to write."""
        return [
            f"{thread.queued:,} record(s) of the metric writer {thread.stats.name}"
            for thread in self._threads
            if thread.queued
        ]

    def _finish(self, *, partial: bool) -> None:
        with self._lock:
            for _, reduction in self._taps.values():
                self._put(reduction.finish(partial=partial))


def _seconds_left(timeout_sec: float | None) -> Callable[[], float | None]:
    if timeout_sec is None:
        return lambda: None
    deadline = monotonic() + timeout_sec
    return lambda: max(0.0, deadline - monotonic())


def _lost(row: WriterStats) -> str:
    counts = [
        f"{count} {what}" for count, what in ((row.failed, "failed"), (row.dropped, "were left out")) if count
    ]
    return f"the metric writer {row.name}: {' and '.join(counts)} of its records. It {row.error}"
