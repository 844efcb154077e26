"""A scope: the part of the devices' streams that one receiver counts and reports, and that receiver's sinks.

A device's messages pass a chain of up to three kinds of links before the sinks of their taps, from the outside in:

- batch sinks (`BatchSink`: recorders and forwarders) get each batch as the device sent it, before it is delivered;
- the sinks of the scope (`ScopeSinks`) get each message;
- the counters of each tap (`TapCounters`) count the messages, errors and seconds of the tap's sink, while a client
  reads them.

The last link is the sink of the tap's consumer. Rules put their gate (`GateSink`) before it. For a value that is
sharded over several devices the gate stands behind the assembly, because a rule looks at the whole value.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hostcallback.receiver import limits, processes
from hostcallback.receiver.errors import DeviceClaimedError
from hostcallback.receiver.failures.check_report import OTHERS
from hostcallback.receiver.failures.deferred_errors import MAX_KEPT, DeferredErrors, MultipleFailures, OnError
from hostcallback.receiver.failures.steps import Occurrence
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Find, Message, Registry, Sink
from hostcallback.receiver.runtime.stats import DeviceStats
from hostcallback.receiver.sinks.batches import masking
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID, ExportedTaps
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.sharding.sinks import shard_sink
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.wire.tap_descriptor import KINDS, TapDescriptor, TapKind

if TYPE_CHECKING:
    from hostcallback.receiver.sinks.metric_writers.sink import MetricsSink
    from hostcallback.receiver.taplog.reading.merge import Stretch
    from hostcallback.receiver.taplog.writing.recorder import Recorder

COLLECTOR = "error collector"
"""Name of the receivers that `error_collector` makes."""

Link = Callable[[Consumer, Sink], Sink]
"""Returns the sink of one consumer's messages, given the rest of the chain; returns that rest if it adds nothing.
The receiver thread calls it once per consumer."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes a device's messages in batches of frames.

    The methods are called in the device's order, on its receiver thread or on the thread that copies frames during a
    long delivery, never on both at once. They must not raise. A scope hands each batch to its batch sinks before the
    first message of it is delivered.
    """

    def record_batch(
        self,
        device: str,
        batch: Batch,
        find: Find,
        *,
        dropped: int = 0,
        first_seq: int = 0,
        last_seq: int = 0,
    ) -> None:
        """Takes a batch. Its memory is reused after the return.

        Args:
            device: the device's name.
            batch: the frames; an END_OF_STREAM frame is the only one of its batch.
            find: finds the consumer of an id.
            dropped: number of messages of the device that are missing among the frames or before them.
            first_seq: the sequence number that was expected next.
            last_seq: the last sequence number of the batch.
        """

    def lose(self, device: str, count: int, reason: str) -> None:
        """Counts messages of a device that were lost before they could be read."""

    def write(self) -> None:
        """Writes all batches so far, so that they survive the death of this process."""

    def flush(self) -> None:
        """Writes all batches so far. `barrier_wait` calls this on the waiting thread."""


class SinkChain:
    """The links before the consumers' sinks, for one device. Used on its receiver thread.

    Attributes:
        find: finds the consumer of an id, whose sink is the whole chain. Without links it is the registry's function
            and costs nothing more.
    """

    def __init__(self, find: Find, links: Sequence[Link] = ()) -> None:
        """Makes the chain.

        Args:
            find: finds consumers with their taps' sinks.
            links: the links, the innermost first.
        """
        self._find = find
        self._links = tuple(links)
        self._linked: dict[int, tuple[Consumer, Consumer]] = {}
        self.find: Find = self._find_linked if self._links else find

    def _find_linked(self, consumer_id: int) -> Consumer | None:
        consumer = self._find(consumer_id)
        if consumer is None:
            return None
        known = self._linked.get(consumer_id)
        # A consumer may have been registered again under its id, with another sink.
        if known is None or known[0] is not consumer:
            known = self._linked[consumer_id] = consumer, self._link(consumer)
        return known[1]

    def _link(self, consumer: Consumer) -> Consumer:
        def own(message: Message) -> Any:
            return consumer.sink(message)  # looked up for each message, because rules may put a gate there

        sink: Sink = own
        for link in self._links:
            sink = link(consumer, sink)
        return consumer if sink is own else dataclasses.replace(consumer, sink=sink)


class ScopeSinks:
    """The sinks of one scope. Any thread.

    They get a value that is sharded over several devices as a whole, and messages of exported programs without the
    tap descriptor that each of them carries.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Delivers each message to all of `sinks`; to one with an attribute `only_kind` messages of that kind."""
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()  # protects `_by_id`, whose entries the devices share
        self._by_id: dict[int, tuple[Sink, bool]] = {}
        self._of_kind: dict[TapKind | None, Sink | None] = {}
        self._registry = Registry()
        self._exported = ExportedTaps(self._registry, self._exported_tap)

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """Returns a sink that calls the scope's sinks and `sink`, the rest of the consumer's chain."""
        found = self._sink_of(consumer)
        if found is None:
            return sink
        extra, own_first = found
        own, sinks = (0, (sink, extra)) if own_first else (1, (extra, sink))
        return lambda message: _deliver(sinks, message)[own]

    def _sink_of(self, consumer: Consumer) -> tuple[Sink, bool] | None:
        # Also whether the tap's own sink comes first. The scope's sinks do, because a tap function may change the
        # arrays. For sharded values the tap's sink does, because it makes devices wait that are far ahead of others.
        with self._lock:
            found = self._by_id.get(consumer.consumer_id)
            if found is None:
                found = self._new_sink(consumer)
                if found is not None:
                    self._by_id[consumer.consumer_id] = found
            return found

    def _new_sink(self, consumer: Consumer) -> tuple[Sink, bool] | None:
        if consumer.consumer_id in (WHOLE_ID, SHARDS_ID):
            exported = self._registry.find(consumer.consumer_id)
            return None if exported is None else (exported.sink, True)
        if consumer.describe is None:
            return None
        try:
            described = consumer.describe()
        except ValueError:  # the tap cannot be described, so it is not known whether it is sharded
            deliver = self._for_kind("")
            return None if deliver is None else (deliver, False)
        deliver = self._for_kind(described.kind)
        if deliver is None:
            return None
        deliver = masking(described.transforms, deliver)
        if described.shards is None:
            return deliver, False
        assemble = described.shards == "all"
        return shard_sink(
            deliver, described.sharding, assemble=assemble, processes=described.processes, waits=False
        ), True

    def _for_kind(self, kind: str) -> Sink | None:
        # Delivers to the sinks that take messages of taps of that kind; None if there are none.
        known = TapKind.named(kind) if TapKind.named(kind) in KINDS else None
        if known not in self._of_kind:
            sinks = [sink for sink in self._sinks if getattr(sink, "only_kind", known) == known]
            self._of_kind[known] = functools.partial(_deliver, sinks) if sinks else None
        return self._of_kind[known]

    def _exported_tap(self, described: TapDescriptor, binding: Binding | None) -> BoundTap:
        deliver = self._for_kind(described.kind)
        also = () if deliver is None else (deliver,)
        return BoundTap(described, Binding(_ignore), unbound=lambda tap: _ignore, waits=False, also=also)


def _deliver(sinks: Sequence[Sink], message: Message) -> list[Any]:
    # The results of all sinks. Each gets the message, whatever the others raise.
    results: list[Any] = []
    errors: list[BaseException] = []
    for sink in sinks:
        try:
            results.append(sink(message))
        except BaseException as error:
            errors.append(error)
    if len(errors) > 1:
        raise MultipleFailures("several sinks of a message", errors)
    if errors:
        raise errors[0]
    return results


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


class Scope:
    """Collects the statistics and deferred errors of the messages delivered while it is current.

    A device's stream passes from one scope to the next at an END_OF_STREAM frame, in the stream's order.
    """

    def __init__(
        self,
        name: str,
        max_errors: int = MAX_KEPT,
        back_pressure: BackPressure | None = None,
        on_error: OnError = OnError.DEFER,
        *,
        log_failures: bool = True,
        made_at: str = "",
    ) -> None:
        """Makes a scope without devices.

        Args:
            name: name in reports.
            max_errors: number of tap exceptions that are kept whole.
            back_pressure: policy of its devices; by default emissions wait for room.
            on_error: action for failed checks and for exceptions of tap functions.
            log_failures: see `DeferredErrors`.
            made_at: the user's line that made its receiver, if there is one.
        """
        self.name = name
        self.made_at = made_at
        self.back_pressure = back_pressure or BackPressure()
        self.deferred = DeferredErrors(max_errors, on_error, log_failures=log_failures)
        self.recorder: Recorder | None = None
        self.batch_sinks: tuple[BatchSink, ...] = ()  # includes the recorder
        self.message_sinks: ScopeSinks | None = None
        self.takes_rest = False  # of the default scope: a receiver was left while programs still emit for it
        self.metrics: MetricsSink | None = None  # one of the message sinks, which a barrier flushes
        self._unrecorded_before: Counter[str] = Counter()
        self._stats: dict[str, DeviceStats] = {}
        self._changed = threading.Condition()  # protects everything below
        self._open_devices: set[str] = set()
        self._calls: Counter[str] = Counter()  # number of running calls by device
        self._called: dict[
            str, tuple[int, float]
        ] = {}  # by device, failures and seconds of the calls that have ended

    def record_with(self, recorder: Recorder) -> None:
        """Records all messages before they are delivered, and counts in `stats` those that could not be recorded.

        Call it before any device is in this scope.
        """
        self.recorder = recorder
        self.deferred.on_exception = recorder.note_exception
        self.deferred.steps_of = functools.partial(_logged_steps, recorder)
        self.deferred.on_steps = recorder.note_steps
        self.add_batch_sink(recorder)
        self._unrecorded_before = self._unrecorded()

    def add_batch_sink(self, sink: BatchSink) -> None:
        """Hands all batches to the sink before they are delivered. Call it before any device is in this scope."""
        self.batch_sinks += (sink,)

    def deliver_to(self, sinks: ScopeSinks) -> None:
        """Delivers all messages also to `sinks`. Call it before any device is in this scope."""
        self.message_sinks = sinks

    def refusal(self, device: str, other: Scope, devices: Sequence[str]) -> DeviceClaimedError:
        """The error of `other`, which wants some devices, of which this one's receiver has `device`."""
        called = f"{self.name!r} " if self.name else ""
        error = DeviceClaimedError(
            f"device {device} already has the receiver {called}made at {self.made_at}, and a device has one receiver "
            f"at a time: leave that `with` block first, or give this receiver other devices= (got {', '.join(devices)})"
        )
        if (self.name == COLLECTOR) != (other.name == COLLECTOR):
            error.add_note(
                'Or let one receiver do both: with outfeed_receiver(record=..., on_error="warn") as rx, whose '
                "rx.failed_checks are those of a collector"
            )
        return error

    def device_stats(self, device: str) -> DeviceStats:
        """Returns the live statistics of a device, which only its receiver thread changes."""
        if device not in self._stats and len(self._stats) >= limits.COUNTED_NAMES:
            device = OTHERS  # a collector's devices are named by others
        return self._stats.setdefault(device, DeviceStats(device))

    @property
    def stats(self) -> list[DeviceStats]:
        """A copy of the statistics, one row per device that had this scope."""
        # Without the lock: only the receiver threads change these rows, and take no lock for each message.
        rows = [s.copy() for s in list(self._stats.values())]
        # Without the lock: the recorder has its own, and must not be asked with this one held.
        unrecorded = self._unrecorded() - self._unrecorded_before
        with self._changed:
            for row in rows:
                row.unrecorded = unrecorded[row.device]
                failed, seconds = self._called.get(row.device, (0, 0.0))
                row.failed += failed
                row.tap_sec += seconds
        return rows

    def _unrecorded(self) -> Counter[str]:
        return Counter() if self.recorder is None else self.recorder.counters.lost_by_device

    def opened(self, device: str) -> None:
        """Adds a device whose stream enters this scope."""
        with self._changed:
            self._open_devices.add(device)

    def closed(self, device: str) -> None:
        """Removes a device whose stream has left this scope: none of its messages will come any more."""
        with self._changed:
            self._open_devices.discard(device)
            self._changed.notify_all()

    def call_began(self, device: str) -> None:
        """Counts a host function that runs for a message of this scope on another thread than the receiver's."""
        with self._changed:
            self._calls[device] += 1

    def call_ended(self, device: str, seconds: float, *, failed: bool) -> None:
        """Counts the end of that host function. Its error, if any, is in `deferred`."""
        with self._changed:
            failures, total = self._called.get(device, (0, 0.0))
            self._called[device] = failures + failed, total + seconds
            self._calls[device] -= 1
            if not self._calls[device]:
                self._changed.notify_all()

    @property
    def has_open_devices(self) -> bool:
        """Whether messages of any device can still arrive here, or calls of this scope run."""
        with self._changed:
            return bool(self._open_devices) or any(self._calls.values())

    def wait_closed(self, device: str, timeout_sec: float) -> bool:
        """Waits until the device has left this scope with all its calls. Returns False after `timeout_sec`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: device not in self._open_devices and not self._calls[device], timeout_sec
            )


MOST_LOOKS = 16
"""Parts of the log that are read for the steps of the failures of one report."""


def _logged_steps(recorder: Recorder, failures: Sequence[Occurrence]) -> dict[Occurrence, int]:
    # The steps of failures, as the log shows them.
    from hostcallback.receiver.taplog.reading.merge import Stretch  # here, because few processes read logs
    from hostcallback.receiver.taplog.reading.reader import LogReader
    from hostcallback.receiver.taplog.reading.selection import ALL, Selection

    found: dict[Occurrence, int] = {}
    try:
        recorder.flush()
        log = LogReader(recorder.directory, run=ALL)
        looks = 0
        for failure in failures:
            if failure in found or looks == MOST_LOOKS:
                continue
            looks += 1
            only = Selection(since_ns=failure.time_ns, until_ns=failure.time_ns + 1)
            for record in log.message_runs(only, by_time=False):
                if isinstance(record, Stretch) and record.device == failure.device:
                    found.update(_steps_in(record, failures))
    except Exception:
        # It was deleted, or is damaged. Whatever it is, the report of the failures must come, then without steps.
        logger.debug("the log of %s has no steps", recorder.directory, exc_info=True)
    return found


def _steps_in(record: Stretch, failures: Iterable[Occurrence]) -> Iterator[tuple[Occurrence, int]]:
    # Those of the failures whose messages are in the part of the log that was read.
    for failure in failures:
        step = record.step_at(failure.seq, failure.time_ns)
        if step is not None and failure.device == record.device:
            yield failure, step


never_entered: dict[object, tuple[str, str]] = {}
"""What users have made for a `with` block and not entered so far: the name of the function and the line. The key of a
receiver is its scope."""
processes.in_child(processes.Stage.RUNTIME, never_entered.clear)  # they are the parent's to enter


def tell_never_entered(keys: Iterable[object]) -> None:
    """Warns once of each block that was made and not entered: none of its options has an effect. Any thread."""
    for key in keys:
        name, made_at = never_entered.pop(key, ("", ""))
        if name:
            logger.warning(
                "the %s made at %s is not entered, and none of its options has an effect: with hcb.%s(...):",
                name, made_at, name,
            )  # fmt: skip


class Totals:
    """Adds up the statistics of closed scopes, and drops its references to the scopes. Any thread."""

    def __init__(self) -> None:
        """Starts without scopes."""
        self._lock = threading.Lock()  # protects everything below
        self._over: dict[str, DeviceStats] = {}
        self._open: list[Scope] = []
        self._counted: weakref.WeakKeyDictionary[Scope, list[DeviceStats]] = weakref.WeakKeyDictionary()

    def begin(self, scope: Scope, claimed: Collection[Scope]) -> None:
        """Adds a scope that claims devices. `claimed` has the scopes that hold other devices now."""
        with self._lock:
            self._settle(claimed)
            # A scope that is entered again continues its earlier statistics, so they leave the closed sums.
            for row in self._counted.pop(scope, ()):
                self._over[row.device].subtract(row)
            if scope not in self._open:
                self._open.append(scope)

    def rows(self, default: Scope, claimed: Collection[Scope]) -> list[DeviceStats]:
        """Returns one row per device, summed over all scopes and the default scope."""
        with self._lock:
            self._settle(claimed)
            found = {device: row.copy() for device, row in self._over.items()}
            for scope in (default, *self._open):
                _add(found, scope.stats)
            return list(found.values())

    def _settle(self, claimed: Collection[Scope]) -> None:
        for scope in list(self._open):
            if scope not in claimed and not scope.has_open_devices:
                self._open.remove(scope)
                rows = self._counted[scope] = scope.stats
                _add(self._over, rows)


def _add(totals: dict[str, DeviceStats], rows: list[DeviceStats]) -> None:
    for row in rows:
        totals.setdefault(row.device, DeviceStats(row.device)).add(row)
