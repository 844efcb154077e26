"""Delivers logged messages, as batches of a dispatcher per device of each process, with the original timing."""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import errors, tap_arguments
from hostcallback.receiver.failures.deferred_errors import failing_message
from hostcallback.receiver.messages import Lease, Message, Registry, Sink, device_text
from hostcallback.receiver.runtime.dispatch.calls import Call, Calls
from hostcallback.receiver.runtime.dispatch.dispatcher import Dispatcher
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sinks.call import ExportedTaps
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.scalars import ScalarsSink
from hostcallback.receiver.sinks.sharding.multi_process import ShardStream
from hostcallback.receiver.sources.source import Batch, Frame
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import ALL_PROCESSES, UNDESCRIBED, TapDescriptor


class LogBatch:
    """Frames of a log as a batch. See `Batch`."""

    def __init__(self, block: FrameBlock, start: int, stop: int, folded: dict[int, int]) -> None:
        """Takes the frames of a block in [start, stop), and removes their counts of left out failures from `folded`."""
        self.count = stop - start
        self.columns = None
        data = block.data
        self.frames: Sequence[Frame] = [(data, offset, None) for offset in block.starts[start:stop]]
        self.folded: Sequence[int] = ()
        if folded:
            counts = [folded.pop(seq, 0) for seq in block.seqs[start:stop].tolist()]
            self.folded = counts if any(counts) else ()

    def release(self) -> None:
        """Does nothing: the frames own their memory."""


class ReplayedCalls(Calls):
    """Calls whose program does not run: host functions may be bound, and their results are dropped."""

    def _start(self, call: Call) -> None:
        self._note(call, threading.current_thread())
        with contextlib.suppress(errors.CallFailedError):  # the failure is in the scope's deferred errors
            self._run(call)


class Pace:
    """Keeps the original timing, or a multiple of its speed."""

    def __init__(self, speed: float) -> None:
        """`speed` is relative to the original: 2.0 takes half the time."""
        self._speed = speed
        self._first_ns: int | None = None
        self._started = 0.0

    def parts(self, times: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Waits for the messages with these times, from index `start` to `stop`; yields the ranges that are due."""
        if self._first_ns is None:
            self._first_ns, self._started = times[start], time.perf_counter()
        while start < stop:
            due = self._started + (times[start] - self._first_ns) / 1e9 / self._speed
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            reached = self._first_ns + (time.perf_counter() - self._started) * 1e9 * self._speed
            end = bisect.bisect_right(times, reached, start + 1, stop)
            yield start, end
            start = end


_CHECK = int(Flags.CHECK)

Parts = Callable[[Sequence[int], int, int], Iterable[tuple[int, int]]]
"""Splits messages into parts that are delivered together: from the times of a block's messages, and the start and stop
of those to deliver, to ranges."""

NOTED_BLOCKS = 16
"""Blocks of a device whose steps are noted, for values that are assembled from several devices."""


class _Noted(NamedTuple):
    # The steps of the messages of a block.
    seqs: Array
    times_ns: Array
    steps: Array


class LogDelivery:
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
        self._sinks = tuple(
            functools.partial(sink.take, step_of=self.step_of) if isinstance(sink, ScalarsSink) else sink
            for sink in sinks
        )
        self._printers = printers
        self._checks_only = checks_only
        self._label = label
        self._stream_of = stream_of
        self._shards = shards
        self._processes: dict[Writer, _ProcessTaps] = {}
        self._noted: dict[str, deque[_Noted]] = {}  # by device
        self._step_of_whole: int | None = None
        self._is_whole = False

    def deliver(self, run: Stretch, parts: Parts | None = None) -> None:
        """Delivers the messages of a run; `parts` splits them."""
        taps = self._processes.get(run.writer)
        if taps is None:
            taps = self._processes[run.writer] = _ProcessTaps(
                self, self._label(run.writer), self._stream_of(run.writer)
            )
        dispatcher, block = taps.ready(run)
        self._note_steps(run)
        # Of the message that was delivered: a report of a failed call has the number and the time of that call's.
        self.scope.deferred.step_of = lambda message: run.step_of(failing_message() or message)
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

    def step_of(self, message: Message) -> int | None:
        """The step of a message that is delivered; None if it is not known."""
        if self._is_whole:
            return self._step_of_whole
        for noted in reversed(self._noted.get(device_text(message.device), ())):
            place = int(np.searchsorted(noted.seqs, np.uint64(message.seq)))
            if place < len(noted.steps) and noted.times_ns[place] == message.time_ns:
                step = int(noted.steps[place])
                return None if step == NO_STEP else step
        return None

    def see(self, message: Message, sink: Sink) -> Sink:
        """Notes the step of a shard; returns a sink for the whole value that has this step.

        When the value is complete, the shard's device may have reached a later step.
        """
        return functools.partial(self._at_step, self.step_of(message), sink)

    def _at_step(self, step: int | None, sink: Sink, message: Message) -> None:
        before = self._is_whole, self._step_of_whole
        self._is_whole, self._step_of_whole = True, step
        try:
            sink(message)
        finally:
            self._is_whole, self._step_of_whole = before

    def _note_steps(self, run: Stretch) -> None:
        # Before the messages are delivered. The parts of a block come one by one.
        noted = self._noted.setdefault(self._label(run.writer) + run.device, deque(maxlen=NOTED_BLOCKS))
        if not noted or noted[-1].steps is not run.steps:
            noted.append(_Noted(run.block.seqs, run.block.times_ns, run.steps))

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
            is_meant = not described.tap_kind.is_check and tap_arguments.matches(described.name, pattern)
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

    def __init__(self, delivery: LogDelivery, label: str, stream: ShardStream | None) -> None:
        self._delivery = delivery
        self._label = label
        self._registry = Registry()
        self._leases: list[Lease] = []
        self._make_tap = functools.partial(delivery.make_tap, stream)
        self._exported = ExportedTaps(self._registry, self._make_tap)
        self._devices: dict[str, tuple[Dispatcher, FrameBlock | None, FrameBlock | None]] = {}

    def ready(self, run: Stretch) -> tuple[Dispatcher, FrameBlock]:
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

    def _know(self, run: Stretch) -> None:
        for consumer_id in run.block.consumers:
            described = run.described.get(consumer_id)
            if described is not None and self._registry.find(consumer_id) is None:
                tap = self._make_tap(described, None)
                self._leases.append(self._registry.lease(tap.consumer))

    def _dispatcher(self, device: str) -> Dispatcher:
        name = self._label + device
        calls = ReplayedCalls(name, lambda batch: None)
        return Dispatcher(self._registry, name, name, self._delivery.scope, lambda token: None, calls)
