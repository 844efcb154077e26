"""Replay: feeds logs through the dispatcher, to printers, collectors of failed checks, and functions bound by name."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from receiver.consumer import Sink
from receiver.deferred import MAX_KEPT, OnError
from receiver.described import Described
from receiver.described_tap import Binding, DescribedTap
from receiver.dispatch import Dispatcher
from receiver.exported import ExportedTaps
from receiver.failed_checks import FailedCheck
from receiver.log import logger
from receiver.log_batches import LogBatch, Pace, ReplayedCalls
from receiver.message import Message
from receiver.registry import Lease, Registry
from receiver.scope import Scope
from receiver.source import Batch
from receiver.stats import DeviceStats
from receiver.taplog.block import Block
from receiver.taplog.errors import Damage, Lost
from receiver.taplog.merge import Run
from receiver.taplog.reader import LogReader, Paths
from receiver.taplog.segment_reader import Writer
from receiver.taplog.selection import Selection
from receiver.wire import Flags

_CHECK = int(Flags.CHECK)


@dataclass(slots=True)
class Replayed:
    """What a replay did.

    Attributes:
        stats: a row for each device: messages delivered, dropped in the program, and so on.
        skipped: messages of taps to which nothing was bound, by the tap's name.
        lost: what the log says is missing.
        damaged: parts of the log that could not be read; without those that its process was killed in.
        failed_checks: the checks that failed, by line, the first failure first.
        unmatched: names that were to be bound, of which the log has no taps.
    """

    stats: list[DeviceStats] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: list[Lost] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    failed_checks: list[FailedCheck] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """How many messages were delivered."""
        return sum(row.delivered for row in self.stats) - self.skipped.total()


class Replay:
    """One replay. One thread.

    Attributes:
        scope: accounts for what is delivered.
        replayed: what came of it so far.
    """

    def __init__(
        self,
        reader: LogReader,
        *,
        bind: Mapping[str, Callable[..., Any] | Binding] | None = None,
        sinks: Sequence[Sink] = (),
        printers: bool = True,
        checks_only: bool = False,
        max_errors: int = MAX_KEPT,
        on_error: OnError = OnError.DEFER,
    ) -> None:
        """Makes ready.

        Args:
            reader: the logs.
            bind: functions by the names, or patterns of names, of the taps whose messages they take.
            sinks: get every message.
            printers: whether what printed and logged does so.
            checks_only: whether only failures of checks are delivered.
            max_errors: see `outfeed_receiver`.
            on_error: see there.
        """
        self._reader = reader
        self._bindings = {
            name: func if isinstance(func, Binding) else Binding(func) for name, func in (bind or {}).items()
        }
        self._matched: set[str] = set()
        self._names: set[str] = set()
        self._sinks = tuple(sinks)
        self._printers = printers
        self._checks_only = checks_only
        self._processes: dict[Writer, _ProcessTaps] = {}
        self.scope = Scope("replay", max_errors, on_error=on_error)
        self.replayed = Replayed()

    def run(self, selection: Selection, pace: float | None = None) -> Replayed:
        """Delivers the messages that are wanted; `pace` is how fast, beside the original: None for at once.

        What sinks and functions raise, and failed checks, are in `scope.deferred` then.
        """
        clock = None if pace is None else Pace(pace)
        # Which checks failed first is told by their times.
        for record in self._reader.runs(selection, by_time=not self._checks_only):
            if isinstance(record, Damage):
                self._note_damage(record)
            elif isinstance(record, Run):
                self._deliver(record, clock, selection)
            else:
                self.replayed.lost.append(record.lost)
        self._finish()
        return self.replayed

    def _deliver(self, run: Run, clock: Pace | None, selection: Selection) -> None:
        taps = self._processes.get(run.writer)
        if taps is None:
            taps = self._processes[run.writer] = _ProcessTaps(self, self._label(run.writer), selection)
        dispatcher, block = taps.ready(run)
        start, stop = run.start, run.stop
        if self._checks_only:
            block = block.part(start, stop)
            block = block.chosen((block.flags & _CHECK) != 0)
            start, stop = 0, len(block)
            if not stop:
                return
        for first, end in [(start, stop)] if clock is None else clock.parts(block.times, start, stop):
            batch: Batch = LogBatch(block, first, end, run.folded)
            dispatcher.deliver(dispatcher.decode(batch))

    def _label(self, writer: Writer) -> str:
        if len(self._reader.writers) == 1:
            return ""
        number = writer.pid if writer.process_index is None else writer.process_index
        return f"process {number}, "

    def make_tap(self, described: Described, binding: Binding | None, selection: Selection) -> DescribedTap:
        """A tap of the log, with what is bound to its name."""
        self._names.add(described.name)
        for pattern, found in self._bindings.items():
            if pattern == described.name or (binding is None and fnmatchcase(described.name, pattern)):
                self._matched.add(pattern)
                binding = found
        wanted = selection.wants_name(described.name)  # of an exported tap only it knows the name
        if not wanted or (binding is None and not self._printers and described.kind in ("print", "format")):
            ignored = replace(described, kind="undescribed")
            return DescribedTap(ignored, Binding(_ignore), unbound=self._unbound, waits=False)
        try:
            return DescribedTap(described, binding, unbound=self._unbound, waits=False, also=self._sinks)
        except ValueError as error:  # its messages are skipped
            self.scope.deferred.add_lost(str(error), 1)
            undescribed = replace(described, kind="undescribed")
            return DescribedTap(undescribed, None, unbound=self._unbound, waits=False, also=self._sinks)

    def _unbound(self, described: Described) -> Sink:
        skipped = self.replayed.skipped

        def skip(message: Message) -> None:
            skipped[described.name] += message.stacked or 1

        return skip

    def _note_damage(self, damage: Damage) -> None:
        if damage.torn:
            return
        self.replayed.damaged.append(damage)
        self.scope.deferred.add_lost(str(damage), max(1, damage.messages))

    def _finish(self) -> None:
        lost: Counter[str] = Counter()
        for note in self.replayed.lost:
            lost[note.device] += note.messages
        self.replayed.stats = self.scope.stats
        for row in self.replayed.stats:
            # A selection leaves gaps that are none: the log knows what was dropped.
            row.dropped = lost[row.device]
        self.replayed.failed_checks = self.scope.deferred.checks()
        self.replayed.unmatched = [name for name in self._bindings if name not in self._matched]
        for name in self.replayed.unmatched:
            near = difflib.get_close_matches(name, self._names, n=3) or sorted(self._names)[:5]
            logger.warning(
                "replay: the log has no messages of a tap %r, to which a function is bound; it has: %s",
                name, ", ".join(map(repr, near)) or "none",
            )  # fmt: skip


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


class _ProcessTaps:
    # The taps of one process, and a dispatcher for each of its devices.

    def __init__(self, replay: Replay, label: str, selection: Selection) -> None:
        self._replay = replay
        self._label = label
        self._selection = selection
        self._registry = Registry()
        self._leases: list[Lease] = []
        self._exported = ExportedTaps(
            self._registry, lambda described, binding: replay.make_tap(described, binding, selection)
        )
        self._devices: dict[str, tuple[Dispatcher, Block, Block]] = {}

    def ready(self, run: Run) -> tuple[Dispatcher, Block]:
        """The device's dispatcher, and the run's block as it delivers it, whose taps are known now."""
        dispatcher, of, block = self._devices.get(run.device) or (self._dispatcher(run.device), None, None)
        if of is not run.block or block is None:
            # Stacks are for functions that are called while more is coming.
            block = run.block.without_flags(int(Flags.BATCHED))
            self._know(run)
            self._devices[run.device] = dispatcher, run.block, block
        return dispatcher, block

    def _know(self, run: Run) -> None:
        for consumer_id in run.block.consumers:
            described = run.described.get(consumer_id)
            if described is not None and self._registry.find(consumer_id) is None:
                tap = self._replay.make_tap(described, None, self._selection)
                self._leases.append(self._registry.lease(tap.consumer))

    def _dispatcher(self, device: str) -> Dispatcher:
        name = self._label + device
        calls = ReplayedCalls(name, lambda batch: None)
        return Dispatcher(self._registry, name, name, self._replay.scope, lambda token: None, calls)


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
    speed: float | None = None,
    realtime: bool = False,
    on_error: OnError | str = OnError.DEFER,
    max_errors: int = MAX_KEPT,
) -> Replayed:
    """Delivers the messages of a tap log once more, through the same dispatcher and sinks, without the program.

    What printed or logged does so again; failures of checks are gathered; functions are called as the taps' were.
    Messages of a device come in their order, those of several devices and processes by time. Works without JAX:
    `device` is a text such as `cpu:0`, and containers of the program's own classes arrive as `receiver.tree.Node`.

        receiver.replay("run/taps", bind={"loss": losses.append})

    Args:
        path: a log's folder, or segments of one.
        bind: functions that take the messages of taps, by the taps' names or patterns of names: called as `id_tap`
            calls them. Taps to which nothing is bound, and that do not print or check, are counted in `skipped`.
        sinks: callables that get every message, as `receiver.message.Message`.
        names: of taps, or patterns such as `layer*/grad`; all others are left out.
        steps: the first and the last step wanted, None for no bound.
        devices: names of devices, or patterns.
        since_ns: Unix time; what was emitted before it is left out.
        until_ns: Unix time; what was emitted at that time or later is left out.
        speed: how fast, beside the original timing: 2.0 takes half the time. By default as fast as it goes.
        realtime: the same as `speed=1.0`.
        on_error: "defer", or "warn": checks that fail are logged and not raised.
        max_errors: how many exceptions, and checks by line, are kept whole.

    Raises:
        TapFunctionException: at the end: what functions and sinks raised, the checks that failed, and parts of the log
            that are damaged, as a barrier raises them.
        TapLogError: there is no log.
        OSError: it cannot be read.
        ValueError: `speed` is not positive, or `on_error` neither of the two.
    """
    if speed is not None and not speed > 0:
        raise ValueError(f"speed is {speed!r}, expected more than 0: 1.0 for the original timing")
    if on_error not in (OnError.DEFER, OnError.WARN):
        raise ValueError(f"on_error is {on_error!r}, expected 'defer' or 'warn': there is no program to stop")
    first, last = steps or (None, None)
    selection = Selection(_several(names), first, last, _several(devices), since_ns, until_ns)
    made = Replay(LogReader(path), bind=bind, sinks=sinks, max_errors=max_errors, on_error=OnError(on_error))
    replayed = made.run(selection, 1.0 if realtime and speed is None else speed)
    error = made.scope.deferred.take()
    if error is not None:
        raise error
    return replayed


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
