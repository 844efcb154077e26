"""Replay: feeds logs through the dispatcher, to printers, reports of failed checks, and functions bound by name."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.failures.deferred_errors import MAX_KEPT, OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Sink
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.replayer.log_delivery import LogDelivery, Pace
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.stats import DeviceStats
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.progress.bars import bars
from hostcallback.receiver.sinks.sharding.multi_process import ShardStream
from hostcallback.receiver.taplog.format.layout import Damage, Lost
from hostcallback.receiver.taplog.reading import logged_message, merge, segment_reader
from hostcallback.receiver.taplog.reading.reader import LogReader, Paths
from hostcallback.receiver.taplog.reading.selection import Selection

MAX_LOGGED_STEPS = 1_000_000
"""Different steps that are kept of each failed check, if only failures are delivered."""


@dataclass(slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        stats: a row per device: messages delivered, dropped in the program, and so on.
        skipped: messages of taps to which no function was bound, by the tap's name.
        lost: messages that the log notes as missing.
        damaged: damaged parts of the log, without the incomplete end that a killed process leaves.
        failed_checks: the failed checks by line, the first failure first.
        incomplete: values that could not be assembled from the shards of several processes, by tap and reason.
        unmatched: bound names that match no tap of the log.
    """

    stats: list[DeviceStats] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: list[Lost] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    failed_checks: list[FailedCheck] = field(default_factory=list)
    incomplete: Counter[str] = field(default_factory=Counter)
    unmatched: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Number of delivered messages."""
        return sum(row.delivered for row in self.stats) - self.skipped.total()


class Replay:
    """One replay. One thread.

    Attributes:
        scope: counts the delivered messages and collects errors.
        replayed: the result so far.
    """

    def __init__(
        self,
        reader: LogReader,
        *,
        bind: Mapping[str, Callable[..., Any] | Binding] | None = None,
        sinks: Sequence[Sink] = (),
        printers: bool = True,
        checks_only: bool = False,
        shards: bool = False,
        max_errors: int = MAX_KEPT,
        on_error: OnError = OnError.DEFER,
    ) -> None:
        """Prepares the replay.

        Args:
            reader: the logs.
            bind: functions by the tap names, or patterns of names, whose messages they receive.
            sinks: each receives every message.
            printers: whether printing and logging taps do so again.
            checks_only: whether only failures of checks are delivered.
            shards: whether shards of programs of several processes are delivered one by one.
            max_errors: see `outfeed_receiver`.
            on_error: see `outfeed_receiver`.
        """
        self._reader = reader
        self._labels = _labels(reader.writers)
        self._checks_only = checks_only
        self._jobs = None if shards else logged_message.LoggedProgramRuns()
        self._shards = shards
        self._make_delivery = functools.partial(
            LogDelivery,
            bind=bind,
            sinks=sinks,
            printers=printers,
            checks_only=checks_only,
            label=self._label,
            stream_of=self._stream,
        )
        self.scope = Scope("replay", max_errors, on_error=on_error)
        if checks_only:
            self.scope.deferred.max_steps = MAX_LOGGED_STEPS
        self.replayed = Replayed()

    def run(self, selection: Selection, pace: float | None = None) -> Replayed:
        """Delivers the selected messages, at `pace` times the original speed; None delivers as fast as possible.

        Exceptions of sinks and functions, and failed checks, are in `scope.deferred` then.
        """
        # Without the other devices' shards no value of several processes would be complete, so shards come one by one.
        if selection.devices:
            self._jobs, self._shards = None, True
        delivery = self._make_delivery(self.scope, selection, shards=self._shards)
        self.replayed.skipped = delivery.skipped
        parts = None if pace is None else Pace(pace).parts
        # Failures of checks need no order of time: their reports compare the times.
        with self.scope.deferred.raised_by_caller():
            for record in self._reader.message_runs(
                selection, by_time=not self._checks_only, order=self._jobs
            ):
                if isinstance(record, Damage):
                    self._note_damage(record)
                elif isinstance(record, merge.Stretch):
                    delivery.deliver(record, parts)
                else:
                    self.replayed.lost.append(record.lost)
        bars.close_all()  # those whose loops did not end
        self._finish(delivery)
        return self.replayed

    def _stream(self, writer: segment_reader.Writer) -> ShardStream | None:
        return None if self._jobs is None or self._reader.is_alone(writer) else self._jobs.stream(writer)

    def _label(self, writer: segment_reader.Writer) -> str:
        return self._labels[writer]

    def _note_damage(self, damage: Damage) -> None:
        if damage.torn:
            return
        self.replayed.damaged.append(damage)
        self.scope.deferred.add_lost(str(damage), max(1, damage.messages))

    def _finish(self, delivery: LogDelivery) -> None:
        if self._jobs is not None:
            self._jobs.finish()
            self.replayed.incomplete = self._jobs.discarded()
        lost: Counter[str] = Counter()
        for note in self.replayed.lost:
            lost[note.device] += note.messages
        self.replayed.stats = self.scope.stats
        for row in self.replayed.stats:
            # A selection causes gaps in the sequence numbers: only the log's notes tell what was dropped.
            row.dropped = lost[row.device]
        self.replayed.failed_checks = self.scope.deferred.checks()
        self.replayed.unmatched = [name for name in delivery.bindings if name not in delivery.matched]
        for name in self.replayed.unmatched:
            near = difflib.get_close_matches(name, delivery.names, n=3) or sorted(delivery.names)[:5]
            logger.warning(
                "replay: the log has no messages of a tap %r, to which a function is bound; it has: %s",
                name, ", ".join(map(repr, near)) or "none",
            )  # fmt: skip


def _labels(writers: Sequence[segment_reader.Writer]) -> dict[segment_reader.Writer, str]:
    # What the names of a process's devices begin with, which those of no other process do.
    if len(writers) == 1:
        return {writers[0]: ""}
    names: dict[segment_reader.Writer, str] = {}
    for writer in writers:
        is_known = any(other.pid == writer.pid and other.host != writer.host for other in writers)
        by_pid = f"process {writer.host}:{writer.pid}" if is_known else f"process {writer.pid}"
        names[writer] = by_pid if writer.process_index is None else f"process {writer.process_index}"
    for equal in _equal(names):
        if len({writer.run for writer in equal}) > 1:
            names |= {writer: f"{names[writer]} of {writer.run}" for writer in equal if writer.run}
    for equal in _equal(names):
        starts = [*dict.fromkeys(writer.process for writer in equal)]
        if len(starts) > 1:
            names |= {
                writer: f"{names[writer]} (start {starts.index(writer.process) + 1})" for writer in equal
            }
    return {writer: f"{name}, " for writer, name in names.items()}


def _equal(names: dict[segment_reader.Writer, str]) -> list[list[segment_reader.Writer]]:
    found: dict[str, list[segment_reader.Writer]] = {}
    for writer, name in names.items():
        found.setdefault(name, []).append(writer)
    return [*found.values()]


@hide_frames
def replay(
    path: Paths,
    *,
    bind: Mapping[str, Callable[..., Any]] | None = None,
    sinks: Sequence[Sink] = (),
    names: str | Sequence[str] = (),
    steps: tuple[int | None, int | None] | None = None,
    devices: str | Sequence[str] = (),
    since_ns: int | None = None,
    until_ns: int | None = None,
    launch: str | None = None,
    speed: float | None = None,
    realtime: bool = False,
    on_error: OnError | str = OnError.DEFER,
    max_errors: int = MAX_KEPT,
    run: str | None = None,
) -> Replayed:
    """Delivers the messages of a tap log once more, through the same dispatcher and sinks, without the program.

    Printing and logging taps do so again; failures of checks are collected; functions are called as the taps' functions
    were. Messages of a device come in order, those of several devices and processes by time. Works without JAX:
    `device` is a text such as `cpu:0`, and containers of the program's own classes arrive as
    `hostcallback.receiver.Node`.

    Args:
        path: a log's folder, or segments of one.
        bind: functions by the tap names, or patterns of names, whose messages they receive; called as `id_tap` calls
            them. Other taps, unless they print or check, are counted in `skipped`.
        sinks: callables that receive every message, as `hostcallback.receiver.messages.Message`.
        names: names of taps, or patterns such as `layer*/grad`; other taps are left out.
        steps: first and last selected step, None for no bound.
        devices: names of devices, or patterns.
        since_ns: Unix time in nanoseconds; earlier messages are left out.
        until_ns: Unix time in nanoseconds; messages of that time or later are left out.
        launch: a launch of the program, as reports show it, such as "c2db94", or its `run_id` in decimal.
        speed: relative to the original timing: 2.0 takes half the time. By default as fast as possible.
        realtime: the same as `speed=1.0`.
        on_error: "defer", or "warn": failed checks are logged and not raised.
        max_errors: number of exceptions, and of checks by line, that are kept whole.
        run: the name of a run, a pattern of names, or "all"; None for the last run in each folder.

    Raises:
        TapFunctionException: at the end: the exceptions of functions and sinks, failed checks, and damaged parts of the
            log, as a barrier raises them.
        TapLogError: the path is not a log.
        OSError: it cannot be read.
        ValueError: `speed` is not positive, or `on_error` is neither of the two.

    Example:
        receiver.replay("run/taps", bind={"loss": losses.append})
    """
    if speed is not None and not speed > 0:
        raise ValueError(f"speed is {speed!r}, expected more than 0: 1.0 for the original timing")
    if on_error not in (OnError.DEFER, OnError.WARN):
        raise ValueError(
            f"on_error is {on_error!r}, expected 'defer' or 'warn': a replay has no program to stop"
        )
    first, last = steps or (None, None)
    selection = Selection(_several(names), first, last, _several(devices), since_ns, until_ns, launch)
    made = Replay(
        LogReader(path, run=run), bind=bind, sinks=sinks, max_errors=max_errors, on_error=OnError(on_error)
    )
    replayed = made.run(selection, 1.0 if realtime and speed is None else speed)
    error = made.scope.deferred.take()
    if error is not None:
        raise error
    return replayed


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
