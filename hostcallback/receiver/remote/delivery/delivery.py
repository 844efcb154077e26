"""Delivers a collector's stored messages to its consumers, on a thread that reads the stored files."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hostcallback.receiver import errors, limits, tap_arguments
from hostcallback.receiver.failures.check_report import BoundedCounter, FailedCheck
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Sink, step_place
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery import cursor, process_groups, stream_printer
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.stream_reader import Again, StoredRuns, end_of_chunk
from hostcallback.receiver.replayer.log_delivery import LogDelivery
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sinks.progress.bars import bars
from hostcallback.receiver.sinks.scalars import ScalarsSink
from hostcallback.receiver.sinks.sharding.multi_process import ShardStream
from hostcallback.receiver.taplog.format.layout import Damage, Lost
from hostcallback.receiver.taplog.reading import merge, segment_reader, selection
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

TURN_SEC = 0.02
"""Minimum seconds between delivery rounds, unless a stream is behind: waking up per slice costs more than delivering
it."""

SAVE_SEC = 1.0
MAX_LINES = 2_000
"""Source lines whose failed checks are kept for the report."""

MAX_DEATHS = 2
"""Times that a collector may die in the delivery of one harmless chunk: a consumer may be the cause."""

EVERYTHING = selection.Selection()


class Delivery:
    """Feeds the consumers of a collector from one thread.

    Attributes:
        scope: counts the delivered messages and collects the errors of all processes.
        lost: messages that streams report as missing, by reason.
        incomplete: values that were not assembled from the shards of several processes, by tap and reason.
        set_aside: messages that were not delivered because their delivery failed, by stream. They stay stored.
    """

    def __init__(
        self,
        store: Store,
        *,
        bind: Mapping[str, Callable[..., Any]] | None = None,
        sinks: Sequence[Sink] = (),
        prints: bool = True,
        everything: bool = False,
        shards: bool = False,
        patience_sec: float = process_groups.PATIENCE_SEC,
        metrics: ScalarsSink | None = None,
    ) -> None:
        """Starts the thread with the stored messages that were not delivered before.

        Args:
            store: the stored streams.
            bind: functions by the tap names, or patterns of names, whose messages they receive.
            sinks: each receives every message.
            prints: whether messages of printing taps are printed.
            everything: whether all messages are printed.
            shards: whether shards of programs of several processes are delivered one by one instead of assembled.
            patience_sec: seconds for which a stream that is ahead waits for others; see `process_groups`.
            metrics: receives every message, too. Its file is opened where the collector before ended.
        """
        self._store = store
        self._bind = dict(bind or {})
        self._sinks: tuple[Sink, ...] = (*sinks, *([] if metrics is None else [metrics]))
        self._metrics = metrics
        self._writes_metrics = True  # whether the last save could
        self._prints = prints
        self._everything = everything
        self._cursor = cursor.Cursor(store.directory)
        if metrics is not None:
            metrics.open_at(self._cursor.metrics, appends=not self._cursor.is_empty)
        self._streams: dict[StreamKey, process_groups.DeliveredStream] = {}
        # Epochs of the printed streams, by run and process number.
        self._epochs: dict[tuple[str, int], set[str]] = {}
        self._jobs = None if shards else process_groups.ProgramRunStreams(patience_sec)
        self._held: dict[StreamKey, StreamOffset] = {}
        self.scope = Scope("collector", MAX_LINES, on_error=OnError.WARN, log_failures=False)
        self.lost: Counter[str] = BoundedCounter()
        self.incomplete: Counter[str] = BoundedCounter()
        self.set_aside: Counter[str] = BoundedCounter()
        self._in_progress = cursor.InProgress(store.directory)
        self._hurry = threading.Event()  # set while a thread waits in `wait_idle`
        self._raised = stream_printer.RateLimitedErrorLog()
        self._changed = threading.Condition()  # protects what follows
        self._grown: dict[StreamKey, StreamOffset] = {}
        self._new: set[StreamKey] = set()  # streams of `_grown` that grew since the last round
        self._stop = False
        self._busy = False
        self._again: dict[StreamKey, Again] = {}  # what was waited for when the collector before ended
        for key, position in store.stored().items():
            waiting = self._cursor.waiting(key)
            if waiting is not None:
                self._again[key] = waiting
            if position > self._cursor.position(key) or waiting is not None:
                self._grown[key] = position
        self._thread = threading.Thread(target=self._run, name="hostcallback-delivery", daemon=True)
        self._thread.start()

    def grown(self, key: StreamKey, position: StreamOffset) -> None:
        """Notes that a stream is stored up to `position`. Any thread; does not wait."""
        with self._changed:
            self._grown[key] = position
            self._new.add(key)
            self._changed.notify_all()

    def wait_idle(self, timeout_sec: float) -> bool:
        """Waits until all stored messages have been delivered; False if `timeout_sec` passes first."""
        # Makes the round that is due begin at once; cleared at the end, or all later rounds would be short.
        self._hurry.set()
        try:
            with self._changed:
                return self._changed.wait_for(lambda: not self._grown and not self._busy, timeout_sec)
        finally:
            self._hurry.clear()

    def failed_checks(self) -> list[FailedCheck]:
        """Failed checks of all processes, by source line, the first failure first."""
        return self.scope.deferred.checks()

    def close(self, timeout_sec: float = 60.0) -> None:
        """Delivers stored messages for at most `timeout_sec` seconds, and ends the thread."""
        self.wait_idle(timeout_sec)
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(timeout_sec)

    def _run(self) -> None:
        save_at = time.monotonic() + SAVE_SEC
        self._examine_interrupted()
        # Shards that the cursor's positions do not include come first: the next saved cursor must still list them.
        for key in list(self._again):
            self._deliver_safely(key, self._cursor.position(key), everything=True)
        turn_at = 0.0
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stop or self._grown, SAVE_SEC)
            # Lets slices that arrive shortly after each other share one round, unless a thread waits for them.
            self._hurry.wait(turn_at - time.monotonic())
            turn_at = time.monotonic() + TURN_SEC
            with self._changed:
                turn, self._grown = self._grown, {}
                new, self._new = self._new, set()
                self._busy = bool(turn)
                stop = self._stop
            is_behind = False
            for key, stored in turn.items():
                if self._stop:  # `close` has run out of time
                    break
                if self._jobs is not None and key in new:
                    self._jobs.grew(key)
                if self._deliver_safely(key, stored):
                    turn_at, is_behind = 0.0, True
                    with self._changed:  # `setdefault`: `grown` may have noted a later position meanwhile
                        self._grown.setdefault(key, stored)
                # Also within a round: after a crash, what was delivered since the last save is delivered again.
                if time.monotonic() >= save_at:
                    save_at = time.monotonic() + SAVE_SEC
                    self._save()
            self._go_on()
            self._report()
            if stop or time.monotonic() >= save_at:
                save_at = time.monotonic() + SAVE_SEC
                self._save(waits=is_behind and not stop, ends=stop)
                for stream in self._streams.values():
                    stream.rest_if_idle(time.monotonic())
                self._forget_some()
            if stop:
                self._report_incomplete()
                # Before the errors are reported, so that a bar does not overwrite their lines.
                bars.close_all()
                self._raised.end()
                return

    def _deliver_safely(self, key: StreamKey, stored: StreamOffset, *, everything: bool = False) -> bool:
        try:
            return self._deliver(key, stored, everything=everything)
        except Exception:  # an error in one stream must not keep the others from being delivered
            logger.exception("a chunk of %s cannot be read, and is set aside", key)
            self.set_aside[str(key)] += 1
            return self._skip(key, stored)
        finally:
            self._in_progress.leave()

    def _skip(self, key: StreamKey, stored: StreamOffset) -> bool:
        # Goes on behind the chunk of a stream that cannot be delivered. Returns whether there is more of it.
        stream = self._streams.get(key)
        if stream is None:
            self._cursor.move(key, stored)
            return False
        stream.runs.skip(stored)
        self._note_position(key, stream.runs)
        return stream.runs.position < stored

    def _examine_interrupted(self) -> None:
        # The collector before died while it delivered this chunk, perhaps of it.
        found = self._in_progress.interrupted
        if found is None or found.key not in self._grown:
            return
        key, at = found.key, found.position
        path = self._store.folder(key.run) / key.segment_name(at.segment)
        findings = cursor.examine(path, key, at)
        if found.deaths < MAX_DEATHS and findings is cursor.Findings.HARMLESS:
            return
        end, count = StreamOffset(at.segment + 1, 0), 0
        with contextlib.suppress(errors.TapLogError, OSError):
            if findings is not cursor.Findings.UNREADABLE:
                offset, count = end_of_chunk(path, at.offset)
                end = StreamOffset(at.segment, offset)
        logger.error(
            "the collector before ended while it delivered %s at %s: what is stored from there to %s is set aside",
            key, tuple(at), tuple(end),
        )  # fmt: skip
        self.set_aside[str(key)] += count or 1
        self._cursor.pass_over(key, end)
        self._again.pop(key, None)
        self._save()

    def _deliver_run(
        self, key: StreamKey, stream: process_groups.DeliveredStream, run: merge.Stretch
    ) -> None:
        try:
            stream.delivery.deliver(run)
        except Exception as error:
            count = run.stop - run.start
            self.set_aside[str(key)] += count
            logger.error(
                "%d message(s) of %s at %s cannot be delivered, and are set aside: %s: %s",
                count, key, tuple(stream.runs.position), type(error).__name__, error,
            )  # fmt: skip

    def _go_on(self) -> None:
        # Resumes the streams that no longer have to wait for others.
        jobs = self._jobs
        if jobs is None:
            return
        try:
            jobs.expire_stalled()
        except Exception:
            logger.exception("a value cannot be delivered")
        ready = {key: stored for key, stored in self._held.items() if not jobs.is_paused(key)}
        for key in ready:
            del self._held[key]
        with self._changed:  # positions that `grown` noted meanwhile are later, and win
            self._grown = {**ready, **self._grown}

    def _deliver(self, key: StreamKey, stored: StreamOffset, *, everything: bool) -> bool:
        # Returns whether more of the stream can be delivered now.
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._make(key)
        jobs = self._jobs

        def is_paused() -> bool:
            return jobs is not None and not everything and jobs.is_paused(key)

        def is_enough() -> bool:
            return self._stop or is_paused()

        if is_paused():
            self._held[key] = stored
            return False
        before = stream.runs.position, stream.runs.done
        for record in stream.everything(stored) if everything else stream.turn(stored, is_enough):
            if isinstance(record, merge.Stretch):
                self._deliver_run(key, stream, record)
            elif isinstance(record, Damage):
                if not record.torn:
                    logger.warning("%s: %s", key, record)
            else:
                self._note_lost(key, record.lost)
        stream.delivery.release()
        self._note_position(key, stream.runs)
        if stream.runs.position >= stored:
            return False
        if is_paused():
            self._held[key] = stored
            return False
        return before != (stream.runs.position, stream.runs.done)

    def _note_position(self, key: StreamKey, runs: StoredRuns) -> None:
        if runs.position >= self._cursor.position(key):  # not while shards from before it are read again
            self._cursor.move(key, runs.position, runs.done)

    def _forget_some(self) -> None:
        # The streams that were read last stay, and of too many descriptions those of the streams with the most go.
        by_age = sorted(self._streams, key=lambda key: self._streams[key].read_at)
        for key in by_age[: max(0, len(by_age) - limits.STREAMS_KEPT)]:
            del self._streams[key]
        described = {key: stream.runs.described for key, stream in self._streams.items()}
        total = sum(described.values())
        for key in sorted(described, key=lambda key: described[key], reverse=True):
            if total <= limits.DESCRIPTIONS_KEPT:
                return
            total -= described[key]
            del self._streams[key]

    def _make(self, key: StreamKey) -> process_groups.DeliveredStream:
        folder = self._store.folder(key.run)
        runs = StoredRuns(
            lambda number: folder / key.segment_name(number),
            self._cursor.position(key),
            self._wants,
            self._again.pop(key, None),
            done=self._cursor.done(key),
            on_chunk=lambda position: self._in_progress.enter(key, position),
        )
        stream = process_groups.DeliveredStream(runs)
        label = f"{key.run} p{key.process} "
        sinks = [sink for sink in self._sinks if sink is not self._metrics]
        if self._prints or self._everything:
            epochs = self._epochs.setdefault((key.run, key.process), set())
            epochs.add(key.epoch)
            printer = stream_printer.StreamPrinter(
                lambda: runs.process_label(key, alone=len(epochs) == 1),
                lambda name: runs.local_devices.get(name),
                lambda message: stream.delivery.step_of(message),
                everything=self._everything,
            )
            sinks.append(printer)
        if self._metrics is not None:
            # The last one, so that the others have the message if it raises.
            # Independent processes of a run have the same number.
            sinks.append(
                functools.partial(
                    self._metrics.take,
                    step_of=lambda message: stream.delivery.step_of(message),
                    device_of=lambda message: " ".join(
                        (
                            key.run,
                            runs.process_label(key, alone=False),
                            str(message.device).removeprefix(label),
                        )
                    ),
                )
            )

        def joint(writer: segment_reader.Writer) -> ShardStream | None:
            if self._jobs is None:
                return None
            return self._jobs.stream(
                key,
                writer.job,
                wants=self._wants,
                devices=lambda: len(runs.local_devices) or 1,
                mark=lambda message: cursor.Waiting(*stream.at, message.seq),
                see=lambda message, sink: stream.delivery.see(message, sink),
            )

        stream.delivery = LogDelivery(
            self.scope,
            EVERYTHING,
            bind=self._bind,
            sinks=sinks,
            printers=False,
            checks_only=not sinks and not self._bind,
            label=lambda writer: label,
            stream_of=joint,
            shards=self._jobs is None,
        )
        return stream

    def _wants(self, described: TapDescriptor) -> bool:
        if self._everything or self._sinks or described.tap_kind.is_check:
            return True
        if self._prints and (described.tap_kind.prints or step_place(described) is not None):
            return True  # steps are printed with the messages
        return any(tap_arguments.matches(described.name, pattern) for pattern in self._bind)

    def _note_lost(self, key: StreamKey, lost: Lost) -> None:
        self.lost[lost.reason] += lost.messages
        logger.warning(
            "%s: %d message(s) of %s, %d to %d, are missing: %s",
            key, lost.messages, lost.device, lost.first_seq, lost.last_seq, lost.reason,
        )  # fmt: skip

    def _report(self) -> None:
        for reason, count in () if self._jobs is None else self._jobs.take_given_up():
            self.incomplete[reason] += count
            logger.warning("%d value(s) of %s", count, reason)
        checks = self.scope.deferred.take_checks()
        report = self.scope.deferred.take()
        # Failed checks stay in the scope: `failed_checks` is about the whole time, the report about new errors.
        self.scope.deferred.put_back(checks)
        if report is not None:
            self._raised.log(report)

    def _report_incomplete(self) -> None:
        for stream, count in self.set_aside.items():
            logger.warning("%d message(s) or chunk(s) of %s were set aside", count, stream)
        if self._jobs is not None and self._jobs.pending_values:
            logger.warning(
                "%d value(s) are incomplete, because shards of other processes are missing. The next collector of this "
                "folder delivers them when the shards arrive", self._jobs.pending_values,
            )  # fmt: skip

    def _save(self, *, waits: bool = True, ends: bool = False) -> None:
        # `waits`: whether the steps for which scalars wait may be among the stored messages.
        if self._jobs is not None:
            self._cursor.wait_for(self._jobs.pending())
        if self._metrics is not None:
            self._save_metrics(self._metrics, waits=waits, ends=ends)
        try:
            self._cursor.save()
        except Exception as error:  # the next turn tries again
            logger.warning("the delivered position cannot be saved: %s", error)

    def _save_metrics(self, metrics: ScalarsSink, *, waits: bool, ends: bool) -> None:
        # Without the file, the other consumers go on, and the noted state of the file stays.
        try:
            if ends:
                metrics.finish()
            elif not waits:
                metrics.release_waiting()
            self._cursor.note_metrics(metrics.state())
            self._writes_metrics = True
        except Exception as error:
            if self._writes_metrics:
                self._writes_metrics = False
                logger.warning("the file of metrics cannot be written: %s: %s", type(error).__name__, error)
