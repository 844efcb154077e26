"""One tap of a program of several processes: its values, put together from the shards that these bring one by one."""

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
"""Run ids of one program in two processes are no further apart than this, if they count from the same number."""


@dataclass(frozen=True, slots=True)
class ShardOrigin:
    """Where a shard came from. It stands for the shard's device while its value is being put together.

    Attributes:
        stream: which of the things that are read one by one: of each, a device's shards come in order.
        device: its device's name.
        process: the number of its process.
        mark: where in the stream it is.
        hand_on: consumes the whole value, if this device leads.
    """

    stream: Hashable
    device: Any
    process: int = field(compare=False)
    mark: Any = field(compare=False)
    hand_on: Callable[[Message], None] = field(compare=False)


class MultiProcessTap:
    """The values of one tap. One thread.

    Attributes:
        assembly: puts them together.
        title: name and source line.
        launch_ids_differ: whether its processes number their launches differently, so that which shards belong
            together is unknown.
    """

    def __init__(self, title: str, device_index: int, room: MemoryBudget) -> None:
        """Makes one without values.

        Args:
            title: name and source line.
            device_index: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            room: of the whole program's incomplete values.
        """
        self.title = title
        self.assembly = Assembly(device_index, room)
        self.launch_ids_differ = False
        self._came: dict[object | None, list[ShardOrigin]] = {}  # by value, those that are pending
        self._left: list[ShardOrigin] = []
        self._partitions: dict[Hashable, set[tuple[int, int, int]]] = {}
        # The launches of each process, until two were met in one; and what has come of these, to be handed on by itself
        # if they never are.
        self._launches: dict[int, set[Launch]] | None = {}
        self._early: list[Shard] = []

    def add(self, shard: Shard) -> Message | None:
        """Adds a shard, whose message's device is an `ShardOrigin`; returns the whole value if it was the last one.

        Raises:
            Ahead: there is no room for it now. Nothing was added.
            ValueError: the shard does not go with the others.
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
        """How many values were given up since the last time, and where the shards are from that belonged to such."""
        count, self.assembly.discarded = self.assembly.discarded, 0
        if count:
            for value in [value for value in self._came if not is_pending(value)]:
                self._left += self._came.pop(value)
        left, self._left = self._left, []
        return count, left

    def take_early(self) -> list[Shard]:
        """What came before it was known that the tap is apart, in order."""
        early, self._early = self._early, []
        return early

    def discard_oldest(self) -> None:
        """Gives up the older half of what is incomplete."""
        self._early.clear()
        self.assembly.discard_oldest()

    def discard_all(self) -> None:
        """Gives up all that is incomplete."""
        self.assembly.discard_all()

    def is_behind(self, stream: Hashable, devices: int) -> bool:
        """Whether others wait for one of a stream's devices, of which it has so many; or may, as far as is known."""
        known = self._partitions.get(stream, set())
        return len(known) < devices or any(self.assembly.is_behind(*partition) for partition in known)

    def oldest(self) -> list[ShardOrigin]:
        """Where the shards are from that there are of the oldest incomplete value."""
        return next(iter(self._came.values()), [])

    def pending(self) -> list[ShardOrigin]:
        """Where the shards are from that there are of incomplete values."""
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
            mine.clear()  # the others are far behind, or not there: what is to come tells as much


def _far_apart(some: set[Launch], others: set[Launch]) -> bool:
    # Run ids are numbers of 32 bits that count up from a hash of the program.
    return all(
        abs((one[0] - other[0] + (1 << 31)) % (1 << 32) - (1 << 31)) > NEAR
        for one in some
        for other in others
    )
