"""Puts the shards of values together, and finds out which values cannot be completed any more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.sharding.launches import Device, Launch, Value
from hostcallback.receiver.sinks.sharding.shard_record import Shard

MAX_PENDING_BYTES = 256 << 20
MAX_PENDING_VALUES = 4096
"""What one tap's incomplete values may come to before a device that is ahead of all others has to wait. The others
may begin as much again, in launches that those ahead have not begun; and twice as many values that are lost already,
because those ahead passed them over: they are noted without their arrays."""

ROOMY = 7 / 8
"""Whoever waits goes on when no more than this part of that is left: not to wait again for the next value."""

OVERTAKEN_BY = 64
"""A value counts as overtaken when all its devices have begun so many later launches: XLA has at most 32 in flight."""

OVERTAKEN_NS = 10_000_000_000
"""For how long an overtaken value is kept nevertheless: its launch may wait for something slow on one device."""

MAX_LAUNCHES = 8192
"""How many launches are remembered of which nothing is pending, if devices that never came must be expected late."""

Key = tuple[int, int, int]
"""A launch: run id, group, number of shards."""


class WouldBlock(Exception):
    """A shard cannot be added now: its device is too far ahead of the others."""


class MemoryBudget:
    """What incomplete values take, of one assembly, or of several together.

    Attributes:
        nbytes: the bytes of their arrays.
    """

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        """Nothing yet."""
        self.nbytes = 0


def is_pending(value: object) -> bool:
    """Whether a value (see `Assembly.value_of`) is neither handed out nor given up."""
    return isinstance(value, Value) and value.arrays is not None


class Assembly:
    """The values of one tap whose shards are coming in. Not thread-safe.

    Each device brings its shards of one launch in order of occurrence. So a device that brings a later one has passed
    over those before it: its shards of them were dropped, and the values are given up. Where a launch ends with such
    values, they are given up when later launches have overtaken them.

    Every value of which a shard was added is handed out once, or counted once in `discarded`, or is still pending. (One
    kind is neither: what a device brings late, after `discard_oldest`, of which no other device had brought a shard.)

    Attributes:
        pending_values: values that are incomplete and not given up.
        pending_bytes: the bytes of their arrays.
        begun: how many values there were so far.
        unfinished: how many of them some device is not through with: the pending ones, and some that were given up.
        finished: how many values all devices are through with. It grows as long as no device stands still.
        discarded: how many values were given up. Whoever reports them sets it back to 0.
    """

    __slots__ = (
        "_begun",
        "_device_index",
        "_devices",
        "_launches",
        "_room",
        "_shared",
        "_tidied",
        "_tidy_at",
        "begun",
        "discarded",
        "finished",
        "pending_bytes",
        "pending_values",
        "unfinished",
    )

    def __init__(self, device_index: int = 0, room: MemoryBudget | None = None) -> None:
        """Makes one without values.

        Args:
            device_index: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            room: shared with other assemblies; its own by default.
        """
        self._device_index = device_index
        self._room = MemoryBudget() if room is None else room
        self._launches: dict[Key, Launch] = {}
        self._devices: dict[Any, Device] = {}  # by group, number of shards, partition and device
        self._begun = 0  # launches
        self._shared = 0  # of these, the last that all devices have begun
        self._tidied = 0  # `_shared` when there was no room and overtaken values were looked for
        self._tidy_at = 2 * OVERTAKEN_BY  # how many launches in the table are tidied up
        self.pending_values = self.pending_bytes = 0
        self.begun = self.unfinished = self.finished = self.discarded = 0

    def __len__(self) -> int:
        """How many launches are remembered."""
        return len(self._launches)

    @property
    def device_count(self) -> int:
        """How many devices there are, as far as the shards that came lately tell."""
        shards: dict[int, int] = {}
        for group, count, _, _ in self._devices:
            shards[group] = max(count, shards.get(group, 0))
        return max(sum(shards.values()), len({device for _, _, _, device in self._devices}))

    @property
    def is_full(self) -> bool:
        """Whether a device that is ahead of all others has to wait."""
        return self._is_full(1)

    @property
    def has_headroom(self) -> bool:
        """Whether a device that had to wait may go on."""
        return not self._is_full(ROOMY)

    def add(self, shard: Shard) -> Message | None:
        """Adds a shard; returns the message with the whole value if it was the last one.

        Raises:
            Ahead: there is no room for one more value, or the launch has the id of an earlier one with which some
                devices are not through. Nothing was added.
            ValueError: the shard does not go with the others. Its value is given up, and not counted.
        """
        message, layout, occurrence, arrays = shard
        if not layout.can_be_whole:  # nobody is to make room for what cannot come
            raise ValueError(
                f"a shard record says that {layout.shards} shards of shapes {layout.tiles} make arrays of shapes "
                f"{list(layout.shapes)}, which are larger: the message is damaged"
            )
        partition = layout.partition
        key = (message.run_id, layout.group, layout.shards)
        launch = self._launches.get(key)
        at = None if launch is None else launch.at.get(partition)
        if launch is None or at is None or occurrence <= at.occurrence:
            begun = self._begin(key, shard)
            if begun is None:
                return None
            launch, at = begun
        value = at.next
        if value is not None and value.occurrence < occurrence:
            at = self._pass_over(launch, partition, value, occurrence)
            value = at.next
        if value is None or value.occurrence > occurrence:
            value = self._insert(launch, at, shard)
        launch.at[partition] = value
        self._come_by(launch, value)
        if value.arrays is None:
            return None
        if value.shapes != layout.shapes:
            self._release(value)
            raise ValueError(
                f"a shard of arrays of shapes {list(layout.shapes)} came where others were of {list(value.shapes)}: "
                "messages of different programs were taken for one value; please report it"
            )
        for number, (part, place) in enumerate(zip(arrays, layout.places, strict=True)):
            if part.shape == value.shapes[number]:
                value.arrays[number] = part
            else:
                value.arrays[number][place] = part
        if value.lead_partition != self._device_index and (
            partition == self._device_index or partition < value.lead_partition
        ):
            value.lead, value.lead_partition = message[2:], partition
        if value.missing:
            return None
        whole = Message(message.consumer, value.arrays, *value.lead)
        self._release(value)
        return whole

    def value_of(self, shard: Shard) -> object | None:
        """Stands for the value of a shard that was just added: the same object for all of its shards; see `is_pending`.

        None for a shard that came late.
        """
        launch = self._launches.get((shard.message.run_id, shard.layout.group, shard.layout.shards))
        value = None if launch is None else launch.at.get(shard.layout.partition)
        return value if value is not None and value.occurrence == shard.occurrence else None

    def is_behind(self, group: int, shards: int, partition: int) -> bool:
        """Whether the others have brought shards of a launch that this one has not."""
        return any(
            launch.is_behind(partition)
            for key, launch in self._launches.items()
            if key[1:] == (group, shards)
        )

    def discard_all(self) -> None:
        """Gives up what is pending."""
        while self.unfinished:
            self.discard_oldest()

    def discard_oldest(self) -> None:
        """Gives up the older half of the unfinished values, however soon their shards may come."""
        count = (self.unfinished + 1) // 2
        for launch in self._launches.values():
            values = list(itertools.islice(launch.unfinished_values(), count))
            self._close(launch, values)
            count -= len(values)
            if not count:
                return

    def _begin(self, key: Key, shard: Shard) -> tuple[Launch, Value] | None:
        # Where a device stands that begins a launch, or one whose id was used before; None for shards that come late.
        partition, occurrence = shard.layout.partition, shard.occurrence
        if occurrence < 0:
            raise ValueError(
                f"a shard record has the occurrence {occurrence}, expected 0 or more: it is damaged"
            )
        launch = self._launches.get(key)
        if launch is None:
            launch = self._begin_first(key, shard)
        at = launch.at.get(partition)
        if at is None:
            at = self._join(launch, shard)
        if occurrence > at.occurrence:
            return launch, at
        if occurrence <= launch.closed and partition in launch.moved:
            return None
        # The launch has the id of an earlier one, and its values are counted from 0 again. (Older XLA makes ids of a
        # program and the number of its launches; the devices forget old counts.)
        if launch.unfinished:
            raise WouldBlock
        del self._launches[key]
        return self._begin(key, shard)

    def _begin_first(self, key: Key, shard: Shard) -> Launch:
        if len(self._launches) >= self._tidy_at:
            self._tidy(shard.message.time_ns)
        self._begun += 1
        launch = self._launches[key] = Launch(self._begun)
        return launch

    def _join(self, launch: Launch, shard: Shard) -> Value:
        message, layout, _, _ = shard
        if launch.first is None:
            raise ValueError(
                f"partition {layout.partition} brought one of {layout.shards} shards, which come from partitions "
                f"{sorted(launch.at)}: messages of different programs were taken for one launch; please report it"
            )
        at = launch.at[layout.partition] = launch.first
        if launch.closed >= 0:
            launch.moved = launch.moved.union([layout.partition])
        key = (layout.group, layout.shards, layout.partition, message.device)
        device = self._devices.get(key)
        if device is None:
            device = self._devices[key] = Device()
        device.begun += 1
        launch.devices[layout.partition] = device, device.begun
        if len(launch.at) == layout.shards:
            launch.first = None
            self._shared = max(self._shared, launch.number)
            for device, number in launch.devices.values():
                device.shared = max(device.shared, number)
        return at

    def _pass_over(self, launch: Launch, partition: int, value: Value, occurrence: int) -> Value:
        # Gives up what is before `occurrence`, and returns the last of it.
        at, following = value, value.next
        self._give_up(at)
        self._come_by(launch, at)
        while following is not None and following.occurrence < occurrence:
            at, following = following, following.next
            self._give_up(at)
            self._come_by(launch, at)
        launch.at[partition] = at
        return at

    def _come_by(self, launch: Launch, value: Value) -> None:
        value.missing -= 1
        if not value.missing:
            launch.unfinished -= 1
            self.unfinished -= 1
            self.finished += 1

    def _insert(self, launch: Launch, at: Value, shard: Shard) -> Value:
        message, layout, occurrence, _ = shard
        missing = layout.shards
        if at.next is not None:
            missing -= sum([other.occurrence > occurrence for other in launch.at.values()])
        if missing == layout.shards > 1:
            # It is the last of its launch (who began a later one has passed it over): nothing before it need be there.
            self._make_room(layout.partition)
        elif missing > 1 and self.unfinished >= 4 * MAX_PENDING_VALUES:
            raise WouldBlock
        device, _ = launch.devices[layout.partition]
        value = Value(occurrence, missing, device, message.time_ns)
        if missing == layout.shards:
            value.begin(shard)
            self.pending_values += 1
            self.pending_bytes += value.nbytes
            self._room.nbytes += value.nbytes
        else:
            self.discarded += 1
        value.next = at.next
        at.next = value
        self.begun += 1
        launch.unfinished += 1
        self.unfinished += 1
        return value

    def _make_room(self, partition: int) -> None:
        if not self._is_full(1):
            return
        if self._tidied != self._shared:
            self._tidied = self._shared
            self._give_up_overtaken(math.inf)
        if self._is_full(2) or (self._is_full(1) and not self._is_behind(partition)):
            raise WouldBlock

    def _is_full(self, part: float) -> bool:
        return self.unfinished >= part * MAX_PENDING_VALUES or self._room.nbytes >= part * MAX_PENDING_BYTES

    def _is_behind(self, partition: int) -> bool:
        # Whether others may be waiting for this device.
        return any(launch.is_behind(partition) for launch in self._launches.values())

    def _tidy(self, now_ns: int) -> None:
        self._give_up_overtaken(now_ns - OVERTAKEN_NS)
        idle = [key for key, launch in self._launches.items() if not launch.unfinished]
        for index, key in enumerate(idle):
            if index < len(idle) - MAX_LAUNCHES or self._shared - self._launches[key].number >= OVERTAKEN_BY:
                del self._launches[key]
        used = {device for launch in self._launches.values() for device, _ in launch.devices.values()}
        self._devices = {key: device for key, device in self._devices.items() if device in used}
        self._tidy_at = 2 * max(OVERTAKEN_BY, len(self._launches))

    def _give_up_overtaken(self, until_ns: float) -> None:
        # Those that were emitted before that.
        for launch in self._launches.values():
            if launch.unfinished:
                values = []
                for value in launch.unfinished_values():
                    if not value.is_overtaken(OVERTAKEN_BY) or value.time_ns >= until_ns:
                        break
                    values.append(value)
                self._close(launch, values)

    def _close(self, launch: Launch, values: Sequence[Value]) -> None:
        # Gives up the first unfinished values of a launch and expects nothing more of them.
        if not values:
            return
        for value in values:
            self._give_up(value)
            value.missing = 0
        self.unfinished -= len(values)
        launch.unfinished -= len(values)
        launch.close(values[-1])

    def _give_up(self, value: Value) -> None:
        if value.arrays is not None:
            self._release(value)
            self.discarded += 1

    def _release(self, value: Value) -> None:
        value.arrays = None
        self.pending_values -= 1
        self.pending_bytes -= value.nbytes
        self._room.nbytes -= value.nbytes
