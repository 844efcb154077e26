"""The sinks of shards: one assembles whole values, the other hands on each shard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from hostcallback.receiver import errors, processes
from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.sinks.sharding.assembly import Assembly, WouldBlock
from hostcallback.receiver.sinks.sharding.launches import TicketQueue
from hostcallback.receiver.sinks.sharding.shard_record import RecordReader, Shard
from hostcallback.receiver.wire.tap_descriptor import ALL_PROCESSES

STANDSTILL_SEC = 10.0
"""A device that is far ahead waits for the others, until no value was completed and no other receiver had messages to
deliver for this many seconds. Its queue fills meanwhile and slows its program down."""

BUSY_STANDSTILL_SEC = 600.0
"""The same limit while other receivers deliver. A tap function may run long, but if it waits for the waiting device,
the two would wait for each other without end."""

# Values are handed on in the order in which they were completed, on any thread. So the taps of a program, and of
# successive programs, keep their order.
turns = TicketQueue()

waiting_threads: set[threading.Thread] = set()
"""Receiver threads that wait for shards of other devices."""


def _after_fork_in_child() -> None:
    # The child process does not have the threads that hold tickets or wait.
    turns.reset()
    waiting_threads.clear()


processes.in_child(processes.Stage.SINKS, _after_fork_in_child)


class LocalShardSink:
    """Hands on each shard separately, with its place in the whole array as `shard_index`. Any thread."""

    __slots__ = ("_reader", "sink")

    def __init__(self, sink: Sink) -> None:
        """Hands the shards to `sink`, which may be replaced at any time."""
        self.sink = sink
        self._reader = RecordReader()

    def __call__(self, message: Message) -> None:
        """Consumes one shard.

        Raises:
            ValueError: the message has no shard record, or a damaged one.
        """
        shard = self._reader.read(message)
        self.sink(message._replace(arrays=shard.arrays, shard_index=shard.layout.places))


class AssemblingSink:
    """Assembles each value from the shards of all devices and hands it on once.

    The receiver threads of all devices of the program call it, each with its shards in order. The thread with a value's
    last shard hands on the message of one device with the whole arrays. `Assembly` describes how values with dropped
    shards are discarded.
    """

    __slots__ = (
        "_assembly",
        "_changed",
        "_lock",
        "_others_deliver",
        "_reader",
        "_standstill",
        "_waiting",
        "_waits",
        "sink",
    )

    def __init__(
        self,
        sink: Sink,
        device_index: int = 0,
        is_another_receiver_busy: Callable[[], bool] = lambda: False,
        *,
        waits: bool = True,
    ) -> None:
        """Makes the sink of one tap.

        Args:
            sink: consumes the whole values; it may be replaced at any time.
            device_index: number of the device whose message has the whole value; if that device has no shard of the
                value, the first one with a shard.
            is_another_receiver_busy: whether a receiver on another thread that does not wait has messages to deliver.
            waits: whether a device that is far ahead waits; False if one thread brings the shards of all devices.
        """
        self.sink = sink
        self._waits = waits
        self._others_deliver = is_another_receiver_busy
        self._reader = RecordReader()
        self._lock = threading.Lock()  # protects everything below
        self._changed = threading.Condition(self._lock)
        self._assembly = Assembly(device_index)
        self._waiting: set[threading.Thread] = set()  # receivers that wait and have not been woken yet
        self._standstill = -1  # number of finished values when values were last discarded to end a standstill

    @property
    def pending_values(self) -> int:
        """Number of values that are incomplete and not discarded."""
        return self._assembly.pending_values

    def __call__(self, message: Message) -> None:
        """Consumes one shard, and the whole value after the last shard.

        Blocks while the message's device is far ahead of the others. Before it hands a value on, it also waits until
        all values that were completed earlier, of any tap, are consumed.

        Raises:
            IncompleteValueError: values of this tap were discarded, because shards of them were lost.
            ValueError: the message has no shard record, or its shard does not fit the others.
            MultipleFailures: values were discarded, and the sink raised.
        """
        self.take(self._reader.read(message))

    def take(self, shard: Shard) -> None:
        """Consumes one shard as a call does; `shard` is decoded already."""
        assembly, ticket, discarded = self._assembly, None, 0
        try:
            with self._lock:
                try:
                    whole = self._add(shard)
                    if whole is not None:
                        ticket = turns.issue()
                finally:
                    discarded, assembly.discarded = assembly.discarded, 0
            if whole is not None:
                turns.wait(ticket)
                self.sink(whole)
        except BaseException as error:
            if discarded:
                raise MultipleFailures(
                    "the sink raised, and values were given up", [error, _incomplete(discarded)]
                ) from None
            raise
        finally:
            if ticket is not None:
                turns.release(ticket)
        if discarded:
            raise _incomplete(discarded)

    def _add(self, shard: Shard) -> Message | None:
        assembly = self._assembly
        begun = assembly.begun
        try:
            return assembly.add(shard)
        except WouldBlock:
            return self._add_in_time(shard)
        finally:
            # Wakes waiting devices, because a value that was begun meanwhile may need their shards.
            if self._waiting and (assembly.has_headroom or assembly.begun > begun):
                self._wake()

    def _add_in_time(self, shard: Shard) -> Message | None:
        assembly = self._assembly
        finished, since = assembly.finished, monotonic()
        quiet_since = since
        while True:
            if not assembly.is_full:
                self._wake()  # this device waits for a launch to end, perhaps for devices that wait for room
            now = monotonic()
            if turns or self._others_deliver():
                quiet_since = now
            if (
                not self._waits
                or finished == self._standstill
                or len(self._waiting) >= assembly.device_count - 1
                or now - quiet_since >= STANDSTILL_SEC
                or now - since >= BUSY_STANDSTILL_SEC
            ):
                # All devices wait for each other, or one has stopped. If it has stopped, `_standstill` makes the others
                # not wait for it again until it goes on.
                self._standstill = finished
                assembly.discard_oldest()
            else:
                self._wait(STANDSTILL_SEC / 10)
            if finished != assembly.finished:
                finished, since = assembly.finished, monotonic()
                quiet_since = since
            try:
                return assembly.add(shard)
            except WouldBlock:
                continue

    def _wait(self, timeout_sec: float) -> None:
        thread = threading.current_thread()
        self._waiting.add(thread)
        waiting_threads.add(thread)
        try:
            self._changed.wait(timeout_sec)
        finally:
            waiting_threads.discard(thread)
            self._waiting.discard(thread)

    def _wake(self) -> None:
        self._waiting.clear()
        self._changed.notify_all()


class ProcessShardSink:
    """Passes on, once each, the shares of values that this process holds in a program of several processes.

    A value of which the process has the whole is assembled, and handed on once. Of other values the shards are handed
    on one by one, with their places; devices that have equal shards count as one. Records of earlier versions do not
    say what the process has: their shards are handed on.
    """

    __slots__ = ("_assembling", "_only_first", "_reader")

    def __init__(self, assembling: AssemblingSink, processes: str | None) -> None:
        """Makes the sink of one tap.

        Args:
            assembling: assembles the values of which the process has the whole, and has the sink of all.
            processes: "all", or "first" (as None) to hand on only what no earlier process has.
        """
        self._assembling = assembling
        self._only_first = processes != ALL_PROCESSES
        self._reader = RecordReader(of_process=True)

    @property
    def sink(self) -> Sink:
        """The sink of values and shards, which may be replaced at any time."""
        return self._assembling.sink

    @sink.setter
    def sink(self, sink: Sink) -> None:
        self._assembling.sink = sink

    @property
    def pending_values(self) -> int:
        """Number of values that are incomplete and not discarded."""
        return self._assembling.pending_values

    def __call__(self, message: Message) -> None:
        """Consumes one shard. Blocks and raises as `AssemblingSink` does."""
        shard = self._reader.read(message)
        share = shard.layout.share
        if share.is_later and self._only_first:
            return
        if share.local:
            self._assembling.take(shard)
        elif not share.is_copy:
            self.sink(message._replace(arrays=shard.arrays, shard_index=shard.layout.places))


SHARD_SINKS = (LocalShardSink, AssemblingSink, ProcessShardSink)


def _incomplete(count: int) -> errors.IncompleteValueError:
    return errors.IncompleteValueError(
        f"{count} value(s) were given up, because shards of them were lost or came much too late: the receiver's stats "
        "say how many messages its back_pressure policy dropped on each device",
        count,
    )


def shard_sink(
    sink: Sink,
    sharding: str,
    *,
    assemble: bool,
    processes: str | None = None,
    device_index: int = 0,
    is_another_receiver_busy: Callable[[], bool] = lambda: False,
    waits: bool = True,
) -> Sink:
    """Returns the sink of messages with a shard record.

    Args:
        sink: consumes the whole values or the separate shards.
        sharding: "global" or "local".
        assemble: whether this process sees all shards.
        processes: if it does not, see `ProcessShardSink`.
        device_index: as in `AssemblingSink`.
        is_another_receiver_busy: as in `AssemblingSink`.
        waits: as in `AssemblingSink`.
    """
    if sharding == "local":
        return LocalShardSink(sink)
    assembling = AssemblingSink(sink, device_index, is_another_receiver_busy, waits=waits)
    return assembling if assemble else ProcessShardSink(assembling, processes)
