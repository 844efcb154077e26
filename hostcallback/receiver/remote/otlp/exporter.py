"""Exports messages to an OpenTelemetry Collector: a sink with a bounded queue, and the thread that drains it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver import files, processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.remote.otlp.client import ExportResult, OtlpClient, OtlpOptions
from hostcallback.receiver.remote.otlp.mapping import Event, MessageMapper, Point
from hostcallback.receiver.remote.sending.sender import BackOff
from hostcallback.receiver.runtime.metrics import collect_metrics
from hostcallback.receiver.runtime.runtime import runtime

ROOM_FOR_FAILURES = 1_000
"""Extra room in the queue for failures of checks, when other messages have filled it."""

MAX_TAPS = 4_096


@dataclass(slots=True)
class OtlpCounters:
    """Counters of an exporter.

    Attributes:
        exported: log records and data points that the collector has accepted.
        lost: messages, log records and data points that will never be exported, by reason.
        left_out: values that are not exported, by reason: arrays and complex numbers, and messages of taps without
            metrics, such as bars.
        failure: the last error; empty if there was none.
    """

    exported: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    failure: str = ""


class OtlpExporter(files.Closing):
    """A sink that exports to an OpenTelemetry Collector. It never waits for the collector and never raises.

    Any thread.

    Example:
        with hcb.otlp("localhost:4317", drain_sec=0.5) as exporter, hcb.outfeed_receiver(sinks=[exporter]):
            train()
    """

    def __init__(self, options: OtlpOptions) -> None:
        """Called by `otlp`."""
        self._options = options
        self._link = OtlpClient(options)
        self._taps: dict[Consumer, MessageMapper] = {}
        self._changed = threading.Condition()  # protects everything below
        self._queue: deque[tuple[MessageMapper, Message, int]] = deque()
        self._queued_bytes = 0
        self._taken = self._done = 0  # messages, since the beginning
        self._hurry = self._closing = False
        self._counters = OtlpCounters()
        self._give_up_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="hostcallback-otlp", daemon=True)
        self._thread.start()
        _exporters.add(self)

    @property
    def counters(self) -> OtlpCounters:
        """A copy of the current counters."""
        with self._changed:
            found = self._counters
            return OtlpCounters(found.exported, Counter(found.lost), Counter(found.left_out), found.failure)

    def __call__(self, message: Message) -> None:
        """Queues one message."""
        if message.consumer.describe is None:
            return  # messages of calls and breakpoints belong to no tap
        tap = self._taps.get(message.consumer)
        if tap is None or not tap.takes(message):
            if len(self._taps) >= MAX_TAPS:
                self._taps.clear()
            tap = self._taps[message.consumer] = MessageMapper(message.consumer, len(message.arrays))
        shortened, left_out = tap.shortened(message), tap.left_out(message)
        if shortened is None:
            with self._changed:
                self._counters.left_out.update(left_out)
            return
        nbytes = sum(array.nbytes for array in shortened.arrays if array is not None)
        with self._changed:
            limit = self._options.queue_messages + (ROOM_FOR_FAILURES if tap.is_check else 0)
            if self._closing:
                self._lose("the exporter was closed", message.stacked or 1)
            elif len(self._queue) >= limit or self._queued_bytes + nbytes > self._options.queue_bytes:
                self._lose("the queue was full", message.stacked or 1)
            else:
                self._counters.left_out.update(left_out)
                self._queue.append((tap, shortened, nbytes))
                self._queued_bytes += nbytes
                self._taken += 1
                if tap.is_check or len(self._queue) == self._options.batch_messages:
                    self._hurry = True
                    self._changed.notify_all()

    def flush(self, timeout_sec: float | None = None) -> bool:
        """Sends the messages queued so far; False if the collector did not accept them in time.

        Args:
            timeout_sec: seconds to wait; `drain_sec` by default.
        """
        with self._changed:
            wanted = self._taken
            self._hurry = True
            self._changed.notify_all()
            timeout_sec = self._options.drain_sec if timeout_sec is None else timeout_sec
            return self._changed.wait_for(lambda: self._done >= wanted, timeout_sec)

    def close(self) -> None:
        """Sends the queued messages for at most `drain_sec` seconds. The rest is counted as lost and logged."""
        with self._changed:
            if self._closing:
                return
            self._closing = self._hurry = True
            self._give_up_at = time.monotonic() + self._options.drain_sec
            self._changed.notify_all()
        # Twice: within the drain time it ends by itself; then closing the channel cancels the request it waits for.
        self._thread.join(self._options.drain_sec)
        self._link.close()
        self._thread.join(self._options.timeout_sec)
        with self._changed:
            left = len(self._queue)
            if left:
                self._lose("not sent before the exporter was closed", left)
                self._queue.clear()
            lost = dict(self._counters.lost)
        if lost:
            logger.warning(
                "%s to %s were lost: %s (%s)", f"{sum(lost.values()):,} message(s)", self._options.endpoint,
                ", ".join(f"{count:,} {reason}" for reason, count in lost.items()), self._counters.failure,
            )  # fmt: skip

    def after_fork_in_child(self) -> None:
        """Drops the parent's queue in a forked child: the thread and the channel belong to the parent."""
        self._changed = threading.Condition()
        self._queue.clear()
        self._closing = True

    def _lose(self, reason: str, count: int) -> None:
        self._counters.lost[reason] += count

    def _run(self) -> None:
        health_at = time.monotonic() + self._options.health_sec
        while True:
            with self._changed:
                left = min(self._options.flush_sec, health_at - time.monotonic())
                self._changed.wait_for(lambda: self._hurry, max(0.0, left))
                # A full batch may be left: it goes at once, and a smaller rest waits for `flush_sec`.
                self._hurry = len(self._queue) > self._options.batch_messages
                batch = [
                    self._queue.popleft() for _ in range(min(len(self._queue), self._options.batch_messages))
                ]
                self._queued_bytes -= sum(nbytes for _, _, nbytes in batch)
                closing = self._closing and not self._queue
            self._export(batch)
            if closing or time.monotonic() >= health_at:
                health_at = time.monotonic() + self._options.health_sec
                self._try_to_send(
                    lambda: self._link.figures_request(collect_metrics(runtime), time.time_ns()), 0
                )
            with self._changed:
                # Also if the batch was lost: `flush` waits until each message was tried, not until it was stored.
                self._done += len(batch)
                self._changed.notify_all()
                if closing or (self._closing and time.monotonic() >= self._give_up_at):
                    return

    def _export(self, batch: list[tuple[MessageMapper, Message, int]]) -> None:
        events: list[Event] = []
        points: list[Point] = []
        for tap, message, _ in batch:
            try:
                for made in tap.made_of(message):
                    if isinstance(made, Event):
                        events.append(made)
                    else:
                        points.append(made)
            except Exception as error:  # an error in one message must not lose the others
                with self._changed:
                    self._lose("the message cannot be converted to a record", 1)
                    self._counters.failure = f"{tap.consumer.name}: {type(error).__name__}: {error}"
        if events:
            self._try_to_send(lambda: self._link.events_request(events, time.time_ns()), len(events))
        if points:
            self._try_to_send(lambda: self._link.points_request(points), len(points))

    def _try_to_send(self, make_request: Callable[[], Any], count: int) -> None:
        try:
            self._send(make_request(), count)
        except Exception as error:  # if this thread ended, all later messages would be lost without a word
            logger.exception("an export to %s failed", self._options.endpoint)
            with self._changed:
                self._lose("the export failed", count)
                self._counters.failure = f"{type(error).__name__}: {error}"

    def _send(self, request: Any, count: int) -> None:
        if request is None:
            return
        back_off, said = BackOff(), False
        while True:
            answer = self._link.send(request)
            with self._changed:
                if answer.text:
                    self._counters.failure = answer.text
                if answer.said is ExportResult.STORED:
                    rejected = min(answer.rejected, count)
                    self._counters.exported += count - rejected
                    if rejected:
                        self._lose("the collector rejected them", rejected)
                    if said:
                        logger.warning("export to %s works again", self._options.endpoint)
                    return
                if answer.said is ExportResult.REFUSED:
                    self._lose("the collector refused them", count)
                    logger.error(
                        "%s does not accept what is exported: %s", self._options.endpoint, answer.text
                    )
                    return
                if not said:
                    said = True
                    logger.warning(
                        "%s cannot be reached at present: %s; the exporter retries",
                        self._options.endpoint, answer.text,
                    )  # fmt: skip
                until = min(time.monotonic() + back_off.next_sec(), self._give_up_at)
                # `close` does not end this wait, but it sets the time at which the exporter gives up.
                while time.monotonic() < until:
                    self._changed.wait(until - time.monotonic())
                    until = min(until, self._give_up_at)
                if time.monotonic() >= self._give_up_at:
                    self._lose("not sent before the exporter was closed", count)
                    return


@hide_frames
def otlp(endpoint: str | None = None, **options: Any) -> OtlpExporter:
    """Creates a sink that exports to an OpenTelemetry Collector over gRPC, for receivers and replays.

    Failures of checks become log records of severity ERROR with file and line. Printed and logged texts become log
    records. Scalars become points of gauges, one metric per leaf of a tap. The metrics of docs/metrics.md are exported
    too. A receiver never waits: a message that finds no room in the queue is dropped, and counted in `counters`. A
    request that the collector cannot accept now is sent again, at growing intervals. docs/otlp.md lists all names.

    Args:
        endpoint: `host:port`, optionally with `http://` or `https://` before it; by default the value of the
            environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`, or `localhost:4317`.
        **options: of `hostcallback.receiver.remote.otlp.client.OtlpOptions`: `tls_ca`, `tls_cert` and `tls_key`
            (paths; TLS is used unless the collector is on this machine), `insecure` (never TLS), `headers` (a dict, for
            example with a token under `authorization`), `service_name`, `resource` (more attributes of this process),
            `queue_messages` and `queue_bytes` (limits of the queue), `batch_messages`, `flush_sec` (longest wait of a
            record for others), `timeout_sec` (of one request), `health_sec` (between the runtime's metrics),
            `drain_sec` (limit for closing).

    Raises:
        HostCallbackError: the package opentelemetry-proto, or grpcio, is missing.
        OSError: a file with a certificate or a key cannot be read.
        TypeError: an option is none of these.
        ValueError: an option is out of range.

    Example:
        with hcb.otlp("localhost:4317", drain_sec=0.5) as exporter, hcb.outfeed_receiver(sinks=[exporter]):
            train()
    """
    if endpoint is None:
        endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or OtlpOptions().endpoint
    return OtlpExporter(OtlpOptions(endpoint=endpoint, **options))


_exporters: weakref.WeakSet[OtlpExporter] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for exporter in list(_exporters):
        exporter.after_fork_in_child()


processes.in_child(processes.Stage.REMOTE, _after_fork_in_child)
