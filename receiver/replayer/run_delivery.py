"""Delivers logged message runs, through a dispatcher per device of each process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hostcallback.receiver.messages.message import Message, Sink
from hostcallback.receiver.messages.registry import Lease, Registry
from hostcallback.receiver.replayer.log_batches import LogBatch, ReplayedCalls
from hostcallback.receiver.runtime.dispatch.dispatcher import Dispatcher
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sinks.call import ExportedTaps
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.sharding.multi_process import ShardStream
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.tap_name import matches
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.reading.merge import MessageRun
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire import Flags
from hostcallback.receiver.wire.tap_descriptor import ALL_PROCESSES, UNDESCRIBED, TapDescriptor

_CHECK = int(Flags.CHECK)

Parts = Callable[[Sequence[int], int, int], Iterable[tuple[int, int]]]
"""Splits messages into parts that are delivered together: from the times of a block's messages, and the start and stop
of those to deliver, to ranges."""


class RunDelivery:
    """The taps of some logged processes, and the consumers of their messages. One thread.

    Attributes:
        scope: counts the delivered messages and collects errors.
        skipped: messages of taps to which no function was bound, by the tap's name.
        matched: the bound patterns that match a tap.
        names: names of the taps found so far.
    """

    def __init__(
        self,
        scope: Scope,
        selection: Selection,
        *,
        bind: Mapping[str, Callable[..., Any] | Binding] | None = None,
        sinks: Sequence[Sink] = (),
        printers: bool = True,
        checks_only: bool = False,
        label: Callable[[Writer], str] = lambda writer: "",
        stream_of: Callable[[Writer], ShardStream | None] = lambda writer: None,
        shards: bool = False,
    ) -> None:
        """Prepares the delivery.

        Args:
            scope: counts the delivered messages and collects errors.
            selection: its names are applied; only the messages of exported taps show their names.
            bind: functions by the tap names, or patterns of names, whose messages they receive. Patterns bind no
            checks. sinks: each receives every message.
            printers: whether printing and logging taps do so.
            checks_only: whether only failures of checks are delivered.
            label: returns the prefix of the names of a process's devices.
            stream_of: returns the stream of shards that a process brings to values of several processes; None if it
                alone is delivered: then what it has of such values.
            shards: whether shards of values of several processes are delivered one by one.
        """
        self.scope = scope
        self.skipped: Counter[str] = Counter()
        self.matched: set[str] = set()
        self.names: set[str] = set()
        self.bindings = {
            name: func if isinstance(func, Binding) else Binding(func) for name, func in (bind or {}).items()
        }
        self._selection = selection
        self._sinks = tuple(sinks)
        self._printers = printers
        self._checks_only = checks_only
        self._label = label
        self._stream_of = stream_of
        self._shards = shards
        self._processes: dict[Writer, _ProcessTaps] = {}

    def deliver(self, run: MessageRun, parts: Parts | None = None) -> None:
        """Delivers the messages of a run; `parts` splits them."""
        taps = self._processes.get(run.writer)
        if taps is None:
            taps = self._processes[run.writer] = _ProcessTaps(
                self, self._label(run.writer), self._stream_of(run.writer)
            )
        dispatcher, block = taps.ready(run)
        start, stop = run.start, run.stop
        if self._checks_only:
            block = block.part(start, stop)
            block = block.chosen((block.flags & _CHECK) != 0)
            start, stop = 0, len(block)
            if not stop:
                return
        for first, end in [(start, stop)] if parts is None else parts(block.times, start, stop):
            batch: Batch = LogBatch(block, first, end, run.folded)
            dispatcher.deliver(dispatcher.decode(batch))

    def release(self) -> None:
        """Frees the blocks that were delivered last, which are kept for their next parts."""
        for taps in self._processes.values():
            taps.release()

    def make_tap(
        self, stream: ShardStream | None, described: TapDescriptor, binding: Binding | None
    ) -> BoundTap:
        """Creates a tap of the log, with the function bound to its name; `stream`: see `stream_of`."""
        joint = None if stream is None or not stream.wants(described) else stream.sink
        self.names.add(described.name)
        for pattern, found in self.bindings.items():
            # A pattern does not capture failures of checks, which belong into the report: a check is bound by its
            # own name.
            is_meant = not described.tap_kind.is_check and matches(described.name, pattern)
            if pattern == described.name or (binding is None and is_meant):
                self.matched.add(pattern)
                binding = found
        wanted = self._selection.wants_name(described.name)
        if not wanted or (binding is None and not self._printers and described.tap_kind.prints):
            ignored = replace(described, kind=UNDESCRIBED.text)
            also = self._sinks if wanted else ()
            tap = BoundTap(
                ignored,
                Binding(_ignore),
                unbound=self._unbound,
                waits=False,
                also=also,
                joint=joint if also else None,
                processes=ALL_PROCESSES,
                apart=self._shards,
            )
            tap.consumer.describe = lambda: described
            return tap
        try:
            return BoundTap(
                described,
                binding,
                unbound=self._unbound,
                waits=False,
                also=self._sinks,
                joint=joint,
                escapes=True,
                processes=ALL_PROCESSES,
                apart=self._shards,
            )
        except ValueError as error:  # its messages are skipped
            self.scope.deferred.add_lost(str(error), 1)
            undescribed = replace(described, kind=UNDESCRIBED.text)
            return BoundTap(undescribed, None, unbound=self._unbound, waits=False, also=self._sinks)

    def _unbound(self, described: TapDescriptor) -> Sink:
        skipped = self.skipped

        def skip(message: Message) -> None:
            skipped[described.name] += message.stacked or 1

        return skip


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


class _ProcessTaps:
    # The taps of one process, and a dispatcher for each of its devices.

    def __init__(self, delivery: RunDelivery, label: str, stream: ShardStream | None) -> None:
        self._delivery = delivery
        self._label = label
        self._registry = Registry()
        self._leases: list[Lease] = []
        self._make_tap = functools.partial(delivery.make_tap, stream)
        self._exported = ExportedTaps(self._registry, self._make_tap)
        self._devices: dict[str, tuple[Dispatcher, FrameBlock | None, FrameBlock | None]] = {}

    def ready(self, run: MessageRun) -> tuple[Dispatcher, FrameBlock]:
        """Returns the device's dispatcher, and the run's block as it delivers it; registers the run's taps."""
        dispatcher, of, block = self._devices.get(run.device) or (self._dispatcher(run.device), None, None)
        if of is not run.block or block is None:
            # Without stacks: they are for functions that are slower than the device.
            block = run.block.without_flags(int(Flags.BATCHED))
            self._know(run)
            self._devices[run.device] = dispatcher, run.block, block
        return dispatcher, block

    def release(self) -> None:
        for device, (dispatcher, of, _) in self._devices.items():
            if of is not None:
                self._devices[device] = dispatcher, None, None

    def _know(self, run: MessageRun) -> None:
        for consumer_id in run.block.consumers:
            described = run.described.get(consumer_id)
            if described is not None and self._registry.find(consumer_id) is None:
                tap = self._make_tap(described, None)
                self._leases.append(self._registry.lease(tap.consumer))

    def _dispatcher(self, device: str) -> Dispatcher:
        name = self._label + device
        calls = ReplayedCalls(name, lambda batch: None)
        return Dispatcher(self._registry, name, name, self._delivery.scope, lambda token: None, calls)
