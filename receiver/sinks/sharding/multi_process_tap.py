"""One tap of a program of several processes: assembles its values from the shards of all processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.sharding.assembly import OVERTAKEN_BY, Assembly, MemoryBudget, is_pending
from hostcallback.receiver.sinks.sharding.shard_record import Shard

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

    def __init__(self, title: str, device_index: int, room: MemoryBudget) -> None:
        """Makes a tap without values.

        Args:
            title: name and source line.
            device_index: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            room: budget of the whole program's incomplete values.
        """
        self.title = title
        self.assembly = Assembly(device_index, room)
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
        elif is_pending(value):
            self._came.setdefault(value, []).append(origin)
        else:
            self._left.append(origin)
        return whole

    def take_given_up(self) -> tuple[int, list[ShardOrigin]]:
        """Returns the number of values discarded since the last call, and the origins of their shards."""
        count, self.assembly.discarded = self.assembly.discarded, 0
        if count:
            for value in [value for value in self._came if not is_pending(value)]:
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
        elif len(mine) % OVERTAKEN_BY == 0 and any(
            len(other) >= OVERTAKEN_BY and _far_apart(mine, other)
            for number, other in launches.items()
            if number != process
        ):
            self.launch_ids_differ = True
            self._launches = None
        elif len(mine) >= 4 * OVERTAKEN_BY:
            mine.clear()  # the others lag or are absent, and later launches serve the comparison as well


def _far_apart(some: set[Launch], others: set[Launch]) -> bool:
    # Run ids are 32-bit numbers that count up from a hash of the program.
    return all(
        abs((one[0] - other[0] + (1 << 31)) % (1 << 32) - (1 << 31)) > NEAR
        for one in some
        for other in others
    )
