"""The sink of a receiver's `writers=`, with a thread for each writer, so that a slow one stops nothing else."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any, TypeVar

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.metric_writers import adapters, reduction
from hostcallback.receiver.wire import tap_descriptor

T = TypeVar("T")

MAX_RECORDS = 1 << 16
MAX_BYTES = 256 << 20
"""What waits for one writer at most, in records and in bytes of their arrays."""
STALL_SEC = 5.0
"""Seconds in one call after which a writer counts as blocked. While its queue is full and it is not, a device waits."""

SETTLE_SEC = 1.0
"""Seconds after which a file gets what came since then, if no barrier has flushed it."""

LAST_SEC = 0.5
"""Seconds that the writers have, where the process is about to end, for what came last."""


@dataclass(slots=True)
class WriterStats:
    """Counts of written and lost records of one writer.

    Attributes:
        name: the writer.
        written: records that it took.
        partial: those among them with metrics that it cannot hold, such as images in a CSV file.
        failed: records for which it raised.
        dropped: records that were left out because it was blocked.
        error: text of the first failure or of the first lack; empty if there was none.

    Example:
        with hcb.outfeed_receiver(writers=[hcb.jsonl("metrics.jsonl")]) as rx:
            hcb.metrics({"loss": loss}, step=step)
        print(rx.writers)
    """

    name: str
    written: int = 0
    partial: int = 0
    failed: int = 0
    dropped: int = 0
    error: str = ""


class WriterThread:
    """The queue and the thread of one writer. Any thread."""

    def __init__(self, writer: reduction.RecordWriter, stall_sec: float = STALL_SEC) -> None:
        """The thread starts with the first record."""
        self._writer = writer
        self._stall_sec = stall_sec
        self._context = contextvars.copy_context()  # trackio's current run is in it
        self._changed = threading.Condition()  # protects everything below
        self._queue: deque[list[reduction.MetricRecord] | Callable[[], None] | None] = deque()
        self._records = self._nbytes = 0
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None
        self._stats = WriterStats(writer.name)
        self._has_failed = self._closed = False
        self._settle: Callable[[], bool] | None = getattr(writer, "settle", None)

    @property
    def stats(self) -> WriterStats:
        """A copy of the counters."""
        with self._changed:
            return replace(self._stats)

    def put(self, records: list[reduction.MetricRecord]) -> None:
        """Queues records. Waits for room while the writer works; drops them if it is blocked."""
        nbytes = sum(record.nbytes for record in records)
        with self._changed:
            while self._records and (
                self._records + len(records) > MAX_RECORDS or self._nbytes + nbytes > MAX_BYTES
            ):
                if self._is_blocked():
                    self._stats.dropped += len(records)
                    return
                self._changed.wait(0.1)
            self._records += len(records)
            self._nbytes += nbytes
            self._add(records)

    @property
    def queued(self) -> int:
        """Number of records that wait for the writer."""
        return self._records

    def flush(self, timeout_sec: float | None = None, look: Callable[[], None] | None = None) -> bool:
        """Flushes what was queued so far, and waits. Returns False if the writer is blocked or the time is up.

        Args:
            timeout_sec: seconds to wait; None for no limit.
            look: called repeatedly while waiting; may raise to stop the wait.
        """
        return self._do(self._writer.flush, timeout_sec, inf, look)

    def close(self, timeout_sec: float | None = None, idle_sec: float = inf) -> bool:
        """Flushes and closes the writer, and waits. Returns False if it is blocked or the time is up.

        Args:
            timeout_sec: seconds to wait; None for no limit.
            idle_sec: seconds without a record after which it gives up.
        """

        def end() -> None:
            try:
                self._writer.flush()
            finally:
                self._writer.close()

        done = False
        try:
            done = self._do(end, timeout_sec, idle_sec)
        finally:  # also after Ctrl-C
            with self._changed:
                self._closed = True
                if not done:  # who closes it reports the loss
                    self._stats.error = self._stats.error or "was not done at the end of the receiver"
                    self._stats.dropped += self._records
                    self._records = 0
                    self._queue.clear()
                self._queue.append(None)
                self._thread = None
                self._changed.notify_all()
        return done

    def _do(
        self,
        action: Callable[[], None],
        timeout_sec: float | None,
        idle_sec: float,
        look: Callable[[], None] | None = None,
    ) -> bool:
        if self._closed or threading.current_thread() is self._thread:
            return True  # a writer that waits for taps would wait for itself
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        since = monotonic()
        deadline = inf if timeout_sec is None else since + timeout_sec
        with self._changed:
            self._add(act)
            left = self._records
            while not done.is_set():
                now = monotonic()
                if self._records != left:
                    left, since = self._records, now
                until = min(deadline, since + idle_sec)
                if now >= until or self._is_blocked():
                    break
                if look is not None:
                    look()
                self._changed.wait(min(until - now, 0.1))
        return done.is_set()

    def _add(self, item: list[reduction.MetricRecord] | Callable[[], None]) -> None:
        self._queue.append(item)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"hostcallback-writer-{self._writer.name}", daemon=True
            )
            self._thread.start()
        self._changed.notify_all()

    def _is_blocked(self) -> bool:
        since = self._busy_since
        if since is None or monotonic() - since < self._stall_sec:
            return False
        self._report(
            f"is blocked: one call takes longer than {self._stall_sec:g} s. The records that do not fit into its queue "
            "are left out, and counted",
            True,
        )
        return True

    def _run(self) -> None:
        due = inf  # when the writer settles next
        while True:
            with self._changed:
                self._changed.notify_all()
                while not self._queue and due > (now := monotonic()):
                    self._changed.wait(None if due == inf else due - now)
                item = self._queue.popleft() if self._queue else []
            if item is None:
                return
            if callable(item):
                self._call(item)
                continue
            for record in item:
                with self._changed:
                    if self._closed:
                        return
                    self._records -= 1
                    self._nbytes -= record.nbytes
                self._call(functools.partial(self._writer.write, record), record)
            if self._settle is None:
                continue
            now = monotonic()
            if now >= due:
                due = now + SETTLE_SEC if self._call(self._settle) else inf
            elif item:
                due = min(due, now + SETTLE_SEC)

    def _call(self, call: Callable[[], T], record: reduction.MetricRecord | None = None) -> T | None:
        # Returns what the call does; None if it raises.
        self._busy_since = monotonic()
        try:
            result = self._context.run(call)
        except reduction.UnsupportedMetric as lack:
            with self._changed:
                self._stats.written += 1
                self._stats.partial += 1
                self._report(f"takes {lack}: these metrics are left out")
        except BaseException as error:  # the writer is the user's: it must not stop the others
            where = "" if record is None else f" at step {record.step}"
            with self._changed:
                self._stats.failed += 1
                self._report(
                    f"failed{where}: {type(error).__name__}: {error}. Further failures are counted", True
                )
        else:
            with self._changed:
                self._stats.written += record is not None
            return result
        finally:
            self._busy_since = None
        return None

    def _report(self, text: str, is_failure: bool = False) -> None:
        # Once per writer, and a first failure even if a lack was reported.
        if not self._stats.error or (is_failure and not self._has_failed):
            self._stats.error = text
            self._has_failed = is_failure
            logger.warning("the metric writer %s %s", self._writer.name, text)


class MetricsSink:
    """Takes the messages of metrics taps. Any thread."""

    only_kind = tap_descriptor.METRICS

    def __init__(self, writers: Sequence[Any]) -> None:
        """Prepares the writers.

        Raises:
            TypeError: one of them is no writer.
        """
        self._writers = [adapters.as_record_writer(writer) for writer in writers]
        self._threads: list[WriterThread] = []
        self._behind: list[WriterThread] = []
        self._lock = threading.Lock()  # protects everything below; devices of a program share reductions
        self._taps: dict[int, tuple[Any, reduction.TapReduction]] = {}
        self._counts: dict[Any, Counter[str]] = {}

    @property
    def stats(self) -> list[WriterStats]:
        """Counts of written and lost records, per writer."""
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
                layout = reduction.TapLayout(describe())
                counts = self._counts.setdefault(layout.key, Counter())
                known = self._taps[consumer.consumer_id] = describe, reduction.TapReduction(layout, counts)
            self._put(known[1].take(message, consumer.devices))

    def _put(self, records: list[reduction.MetricRecord]) -> None:
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

    def drain(self, timeout_sec: float) -> bool:
        """Flushes, and notes the writers that are not done after the time, of which they get `LAST_SEC` at least."""
        self._finish(partial=False)
        left_sec = _seconds_left(max(timeout_sec, LAST_SEC))
        self._behind = [thread for thread in self._threads if not thread.flush(left_sec())]
        return not self._behind

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
        return _queued(self._threads)

    def behind(self) -> list[str]:
        """As `backlog`, of the writers that the last `drain` did not wait for any longer."""
        return _queued(self._behind)

    def _finish(self, *, partial: bool) -> None:
        with self._lock:
            for _, reduces in self._taps.values():
                self._put(reduces.finish(partial=partial))


def _queued(threads: Sequence[WriterThread]) -> list[str]:
    return [
        f"{thread.queued:,} record(s) of the metric writer {thread.stats.name}"
        for thread in threads
        if thread.queued
    ]


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
