"""Assembles arrays, and the taps of them, that are sharded over the processes of one program run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.sinks.sharding import assembly
from hostcallback.receiver.sinks.sharding.shard_record import RecordReader, Shard
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

Launch = tuple[int, int, int]
"""Run id, group, number of shards."""

NEAR = 1 << 20
"""Run ids of one program in two processes differ by at most this, if both processes count from the same number."""


@dataclass(frozen=True, slots=True)
class ShardOrigin:
    """Origin of a shard. It takes the place of the message's device while the value is being assembled.

    Attributes:
        stream: key of the input stream. Within one stream the shards of a device arrive in order.
        device: name of the device.
        process: index of the process.
        mark: position in the stream.
        hand_on: consumes the whole value if this device leads.
    """

    stream: Hashable
    device: Any
    process: int = field(compare=False)
    mark: Any = field(compare=False)
    hand_on: Callable[[Message], None] = field(compare=False)


class MultiProcessTap:
    """The values of one tap. Used on one thread.

    Attributes:
        assembly: assembles the values.
        title: name and source line.
        launch_ids_differ: whether its processes number their launches differently, so that shards of one value cannot
            be matched.
    """

    def __init__(self, title: str, device_index: int, room: assembly.MemoryBudget) -> None:
        """Makes a tap without values.

        Args:
            title: name and source line.
            device_index: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            room: budget of the whole program's incomplete values.
        """
        self.title = title
        self.assembly = assembly.Assembly(device_index, room)
        self.launch_ids_differ = False
        self._came: dict[object | None, list[ShardOrigin]] = {}  # by pending value, the origins of its shards
        self._left: list[ShardOrigin] = []
        self._partitions: dict[Hashable, set[tuple[int, int, int]]] = {}
        # The launches of each process, until two processes have a launch in common; and the shards that came so far, to
        # be delivered separately if they never have one.
        self._launches: dict[int, set[Launch]] | None = {}
        self._early: list[Shard] = []

    def add(self, shard: Shard) -> Message | None:
        """Adds a shard whose message has a `ShardOrigin` as its device. Returns the whole value after the last shard.

        Raises:
            WouldBlock: there is no room for it now. The shard was not added.
            ValueError: the shard does not fit the others.
        """
        origin: ShardOrigin = shard.message.device
        whole = self.assembly.add(shard)
        layout = shard.layout
        self._partitions.setdefault(origin.stream, set()).add((layout.group, layout.shards, layout.partition))
        if self._launches is not None:
            self._early.append(shard)
            self._compare(origin.process, (shard.message.run_id, layout.group, layout.shards))
        value = self.assembly.value_of(shard)
        if whole is not None:
            self._came.pop(value, None)
        elif assembly.is_pending(value):
            self._came.setdefault(value, []).append(origin)
        else:
            self._left.append(origin)
        return whole

    def take_given_up(self) -> tuple[int, list[ShardOrigin]]:
        """Returns the number of values discarded since the last call, and the origins of their shards."""
        count, self.assembly.discarded = self.assembly.discarded, 0
        if count:
            for value in [value for value in self._came if not assembly.is_pending(value)]:
                self._left += self._came.pop(value)
        left, self._left = self._left, []
        return count, left

    def take_early(self) -> list[Shard]:
        """Removes and returns, in order, the shards that came before `launch_ids_differ` was known."""
        early, self._early = self._early, []
        return early

    def discard_oldest(self) -> None:
        """Discards the older half of the incomplete values."""
        self._early.clear()
        self.assembly.discard_oldest()

    def discard_all(self) -> None:
        """Discards all incomplete values."""
        self.assembly.discard_all()

    def is_behind(self, stream: Hashable, devices: int) -> bool:
        """Whether others wait, or may wait, for one of the devices of a stream, which has `devices` of them."""
        known = self._partitions.get(stream, set())
        return len(known) < devices or any(self.assembly.is_behind(*partition) for partition in known)

    def oldest(self) -> list[ShardOrigin]:
        """Returns the origins of the shards of the oldest incomplete value."""
        return next(iter(self._came.values()), [])

    def pending(self) -> list[ShardOrigin]:
        """Returns the origins of the shards of all incomplete values."""
        return [origin for came in self._came.values() for origin in came]

    def _compare(self, process: int, launch: Launch) -> None:
        launches = self._launches
        assert launches is not None
        mine = launches.setdefault(process, set())
        if launch in mine:
            return
        mine.add(launch)
        if any(launch in other for number, other in launches.items() if number != process):
            self._launches = None
            self._early.clear()
        elif len(mine) % assembly.OVERTAKEN_BY == 0 and any(
            len(other) >= assembly.OVERTAKEN_BY and _far_apart(mine, other)
            for number, other in launches.items()
            if number != process
        ):
            self.launch_ids_differ = True
            self._launches = None
        elif len(mine) >= 4 * assembly.OVERTAKEN_BY:
            mine.clear()  # the others lag or are absent, and later launches serve the comparison as well


def _far_apart(some: set[Launch], others: set[Launch]) -> bool:
    # Run ids are 32-bit numbers that count up from a hash of the program.
    return all(
        abs((one[0] - other[0] + (1 << 31)) % (1 << 32) - (1 << 31)) > NEAR
        for one in some
        for other in others
    )


PARKED_BYTES = 64 << 20
"""Bytes of one stream that may be read beyond the budget, while other streams wait for shards that may follow."""

OVERHEAD_BYTES = 1 << 10
"""Bytes that a shard takes in addition to its arrays."""

NOT_WHOLE = "values were given up, because shards of them were lost, or did not come in time"
APART = (
    "values cannot be put together, because the processes number the launches of the program differently (one loaded "
    "it from a compilation cache, the other compiled it, or they run different programs): their shards are delivered "
    "by themselves. Without jax_compilation_cache_dir all processes compile"
)


class BufferedShard(NamedTuple):
    """A shard that did not fit into the budget, or that followed such a shard.

    Attributes:
        tap: the tap of the shard.
        shard: the shard.
        begun: number of values that the tap had begun when the shard did not fit; -1 before the first try.
    """

    tap: MultiProcessTap
    shard: Shard
    begun: int

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return OVERHEAD_BYTES + sum(array.nbytes for array in self.shard.arrays)


class ProgramRun:
    """The values of a program's taps, over all its processes. Used on one thread.

    The processes are read as several *streams*, each of which brings the shards of its devices in order. A stream that
    is far ahead of others is *held*: the reader leaves the rest of it for later.

    Attributes:
        discarded: number of discarded values by tap and reason. The caller that reports them clears it.
        left: origins of the shards of discarded values, if kept. The caller that reads them clears it.
    """

    def __init__(self, *, keeps_left: bool = False) -> None:
        """Makes a run without values. `keeps_left`: whether to keep `left`."""
        self.left: list[ShardOrigin] = []
        self._keeps_left = keeps_left
        self.discarded: Counter[str] = Counter()
        self._room = assembly.MemoryBudget()
        self._taps: dict[int, MultiProcessTap] = {}
        self._parked: dict[ShardOrigin, deque[BufferedShard]] = {}  # by the device of a stream
        self._parked_bytes: Counter[Hashable] = Counter()  # by stream
        self._held: dict[
            Hashable, tuple[tuple[int, ...], bool]
        ] = {}  # by stream, the state and the answer for it

    @property
    def pending_values(self) -> int:
        """Number of incomplete values."""
        return sum(tap.assembly.pending_values for tap in self._taps.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes of incomplete values, and of the shards that wait for room."""
        return self._room.nbytes + self._parked_bytes.total()

    @property
    def has_parked(self) -> bool:
        """Whether shards are buffered that do not fit into the budget."""
        return bool(self._parked)

    def tap(self, described: TapDescriptor) -> MultiProcessTap:
        """Returns the tap with this description. A tap has the same id in all processes."""
        found = self._taps.get(described.consumer_id)
        if found is None:
            title = f"{described.name} at {described.source_line}"
            found = self._taps[described.consumer_id] = MultiProcessTap(
                title, described.device_index, self._room
            )
        return found

    def add_shard(self, tap: MultiProcessTap, shard: Shard) -> None:
        """Adds a shard whose message has a `ShardOrigin` as its device.

        Raises:
            Exception: an error of a consumer, or a ValueError of `MultiProcessTap.add`.
        """
        origin: ShardOrigin = shard.message.device
        try:
            if origin in self._parked:
                self._park(origin, tap, shard)
                return
            try:
                whole = tap.add(shard)
            except assembly.WouldBlock:
                self._park(origin, tap, shard)
                return
            if whole is not None:
                whole.device.hand_on(whole._replace(device=whole.device.device))
        finally:
            self._count(tap)
            if self._parked:
                self._unpark()

    def is_paused(self, stream: Hashable, devices: int) -> bool:
        """Whether the reader should pause a stream, which has the shards of `devices` devices."""
        nbytes = self._parked_bytes[stream]
        if not nbytes or nbytes >= PARKED_BYTES:
            return nbytes > 0
        heads = [parked[0].tap for origin, parked in self._parked.items() if origin.stream == stream]
        state = nbytes, devices, *(tap.assembly.begun for tap in heads)
        known, held = self._held.get(stream, ((), False))
        if known != state:
            held = not any(tap.is_behind(stream, devices) for tap in heads)
            self._held[stream] = state, held
        return held

    def leaders(self) -> set[int]:
        """Returns the processes that have sent shards of the oldest incomplete values. The others lag behind."""
        return {origin.process for tap in self._heads() for origin in tap.oldest()}

    def evict_oldest(self) -> None:
        """Discards the older half of the values that held streams wait for, and adds the shards that fit then.

        Raises:
            Exception: an error of a consumer.
        """
        heads = self._heads()
        if not any(tap.assembly.unfinished for tap in heads):
            heads = list(self._taps.values())  # the values of other taps fill the budget
        for tap in heads:
            tap.discard_oldest()
        self._count_all()
        self._unpark()

    def discard(self) -> None:
        """Discards all incomplete values, when no more shards will come.

        Raises:
            Exception: an error of a consumer.
        """
        while self.pending_values or self._parked:
            for tap in self._taps.values():
                tap.discard_all()
            self._count_all()
            self._unpark()

    def pending(self) -> Iterator[ShardOrigin]:
        """Yields the origins of all shards of incomplete values, which would be read again after a restart."""
        for tap in self._taps.values():
            yield from tap.pending()
        for parked in self._parked.values():
            for item in parked:
                yield item.shard.message.device

    def _heads(self) -> list[MultiProcessTap]:
        # The taps for which parked shards wait.
        return list({id(parked[0].tap): parked[0].tap for parked in self._parked.values()}.values())

    def _park(self, origin: ShardOrigin, tap: MultiProcessTap, shard: Shard) -> None:
        parked = BufferedShard(tap, shard, -1)
        self._parked.setdefault(origin, deque()).append(parked)
        self._parked_bytes[origin.stream] += parked.nbytes

    def _unpark(self) -> None:
        # A shard that fits now may complete a value and make room for the next shard of another stream.
        progress = True
        while progress:
            progress = False
            for origin, parked in list(self._parked.items()):
                while self._has_changed(parked[0]) and self._take_in(origin, parked):
                    progress = True
                    if origin not in self._parked:
                        break

    def _has_changed(self, parked: BufferedShard) -> bool:
        # A quick check whether a new try can succeed; `add` decides.
        of_tap = parked.tap.assembly
        return of_tap.has_headroom or of_tap.begun > parked.begun

    def _take_in(self, origin: ShardOrigin, parked: deque[BufferedShard]) -> bool:
        item = parked[0]
        if item.tap.launch_ids_differ:
            self._unparked(origin, parked)
            _hand_on_alone(item.shard)
            return True
        try:
            whole = item.tap.add(item.shard)
        except assembly.WouldBlock:
            parked[0] = item._replace(begun=item.tap.assembly.begun)
            return False
        except ValueError:  # it does not fit the others, and is skipped
            self._unparked(origin, parked)
            raise
        finally:
            self._count(item.tap)
        self._unparked(origin, parked)
        if whole is not None:
            whole.device.hand_on(whole._replace(device=whole.device.device))
        return True

    def _unparked(self, origin: ShardOrigin, parked: deque[BufferedShard]) -> None:
        self._parked_bytes[origin.stream] -= parked.popleft().nbytes
        if not parked:
            del self._parked[origin]

    def _count_all(self) -> None:
        for tap in self._taps.values():
            self._count(tap)

    def _count(self, tap: MultiProcessTap) -> None:
        early = tap.take_early() if tap.launch_ids_differ else []
        if tap.launch_ids_differ:
            tap.discard_all()
        count, left = tap.take_given_up()
        if self._keeps_left and not tap.launch_ids_differ:
            self.left += left
        if count:
            self.discarded[f"{tap.title}: {APART if tap.launch_ids_differ else NOT_WHOLE}"] += count
        for shard in early:
            _hand_on_alone(shard)


def _hand_on_alone(shard: Shard) -> None:
    message = shard.message
    origin: ShardOrigin = message.device
    origin.hand_on(
        message._replace(device=origin.device, arrays=shard.arrays, shard_index=shard.layout.places)
    )


class ShardStream(NamedTuple):
    """One input stream of a program run.

    Attributes:
        job: the program run.
        key: key of the stream within the run.
        process: index of the process.
        wants: whether to assemble the values of a tap; shards of other taps are delivered separately.
        mark: returns the position of a message in the stream.
        see: gets each shard when it comes, as a message of its device, and the sink. Returns the consumer of the value
            for the case that this device leads: the sink or a wrapper of it.
    """

    job: ProgramRun
    key: Hashable
    process: int
    wants: Callable[[TapDescriptor], bool]
    mark: Callable[[Message], object]
    see: Callable[[Message, Sink], Sink]

    def sink(self, described: TapDescriptor, sink: Sink) -> Sink:
        """Returns a sink for the shards of one tap; `sink` gets the whole values that this stream's devices lead."""
        return _StreamTap(self, self.job.tap(described), sink)


class _StreamTap:
    __slots__ = ("_reader", "_sink", "_stream", "_tap")

    def __init__(self, stream: ShardStream, tap: MultiProcessTap, sink: Sink) -> None:
        self._stream = stream
        self._tap = tap
        self._sink = sink
        self._reader = RecordReader()

    def __call__(self, message: Message) -> None:
        stream, tap = self._stream, self._tap
        shard = self._reader.read(message)
        alone = message._replace(arrays=shard.arrays, shard_index=shard.layout.places)
        sink = stream.see(alone, self._sink)
        if tap.launch_ids_differ:
            sink(alone)
            return
        origin = ShardOrigin(stream.key, message.device, stream.process, stream.mark(message), sink)
        stream.job.add_shard(tap, shard._replace(message=message._replace(device=origin)))
