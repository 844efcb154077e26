"""Assembles the shards of values, and finds the values that cannot be completed any more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding.launches import Device, Launch, Value
from hostcallback.receiver.sinks.sharding.shard_record import Shard

MAX_PENDING_BYTES = 256 << 20
MAX_PENDING_VALUES = 4096
"""Limits of one tap's incomplete values, above which a device that is ahead of all others has to wait. The others may
begin the same amount again, in launches that the devices ahead have not begun; and twice as many values that are lost
already, because the devices ahead have passed over them. Lost values are kept without their arrays."""

ROOMY = 7 / 8
"""Part of these limits below which a waiting device goes on, so that it does not wait again for the next value."""

OVERTAKEN_BY = 64
"""A value is overtaken when all its devices have begun this many later launches. XLA has at most 32 in flight."""

OVERTAKEN_NS = 10_000_000_000
"""Time in ns for which an overtaken value is kept, because its launch may wait for a slow operation on one device."""

MAX_LAUNCHES = 8192
"""Number of launches without pending values that are remembered while shards of some devices may still come late."""

Key = tuple[int, int, int]
"""A launch: run id, group, number of shards."""


class WouldBlock(Exception):
    """A shard cannot be added now: its device is too far ahead of the others."""


class MemoryBudget:
    """Memory of incomplete values, of one assembly or of several together.

    Attributes:
        nbytes: the bytes of their arrays.
    """

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        """Starts at 0 bytes."""
        self.nbytes = 0


def is_pending(value: object) -> bool:
    """Whether a value (see `Assembly.value_of`) is neither delivered nor discarded."""
    return isinstance(value, Value) and value.arrays is not None


class Assembly:
    """The incomplete values of one tap. Not thread-safe.

    Each device brings its shards of one launch in order of occurrence. So if a device brings a later one, its shards of
    the values before it were dropped: the device has passed over these values, and they are discarded. If such values
    are the last of their launch, they are discarded once later launches have overtaken them.

    Each value of which a shard was added is delivered once, counted once in `discarded`, or still pending. (The
    exception: values of which a device brings the first shard late, after `discard_oldest`.)

    Attributes:
        pending_values: number of values that are incomplete and not discarded.
        pending_bytes: bytes of their arrays.
        begun: number of values so far.
        unfinished: number of values that some device has neither brought nor passed over: the pending ones, and some
            that were discarded.
        finished: number of values that all devices have brought or passed over. It grows as long as no device stops.
        discarded: number of values that were discarded. The caller that reports them sets it back to 0.
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
        """Makes an assembly without values.

        Args:
            device_index: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            room: budget that it shares with other assemblies; None for a separate one.
        """
        self._device_index = device_index
        self._room = MemoryBudget() if room is None else room
        self._launches: dict[Key, Launch] = {}
        self._devices: dict[Any, Device] = {}  # by group, number of shards, partition and device
        self._begun = 0  # launches
        self._shared = 0  # number of the last launch that all devices have begun
        self._tidied = 0  # `_shared` when there was no room and overtaken values were looked for
        self._tidy_at = 2 * OVERTAKEN_BY  # number of launches in the table at which it is tidied
        self.pending_values = self.pending_bytes = 0
        self.begun = self.unfinished = self.finished = self.discarded = 0

    def __len__(self) -> int:
        """Returns the number of remembered launches."""
        return len(self._launches)

    @property
    def device_count(self) -> int:
        """Number of devices, inferred from the recent shards."""
        shards: dict[int, int] = {}
        for group, count, _, _ in self._devices:
            shards[group] = max(count, shards.get(group, 0))
        return max(sum(shards.values()), len({device for _, _, _, device in self._devices}))

    @property
    def is_full(self) -> bool:
        """Whether a device that is ahead of all others must wait."""
        return self._is_full(1)

    @property
    def has_headroom(self) -> bool:
        """Whether a device that had to wait may go on."""
        return not self._is_full(ROOMY)

    def add(self, shard: Shard) -> Message | None:
        """Adds a shard. Returns the message with the whole value if the shard was the last one; else None.

        Raises:
            WouldBlock: there is no room for one more value, or the launch has the id of an earlier one that some
                devices have not finished. The shard was not added.
            ValueError: the shard does not fit the others. Its value is discarded and not counted.
        """
        message, layout, occurrence, arrays = shard
        if not layout.can_be_whole:  # the shards cannot fill the whole arrays, so these are not allocated
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
        """Returns an object that stands for the value of a shard that was just added; see `is_pending`.

        It is the same object for all shards of a value. Returns None for a shard that came late.
        """
        launch = self._launches.get((shard.message.run_id, shard.layout.group, shard.layout.shards))
        value = None if launch is None else launch.at.get(shard.layout.partition)
        return value if value is not None and value.occurrence == shard.occurrence else None

    def is_behind(self, group: int, shards: int, partition: int) -> bool:
        """Whether other devices have brought shards of a launch that this partition has not brought."""
        return any(
            launch.is_behind(partition)
            for key, launch in self._launches.items()
            if key[1:] == (group, shards)
        )

    def discard_all(self) -> None:
        """Discards all pending values."""
        while self.unfinished:
            self.discard_oldest()

    def discard_oldest(self) -> None:
        """Discards the older half of the unfinished values, even if their shards may still come."""
        count = (self.unfinished + 1) // 2
        for launch in self._launches.values():
            values = list(itertools.islice(launch.unfinished_values(), count))
            self._close(launch, values)
            count -= len(values)
            if not count:
                return

    def _begin(self, key: Key, shard: Shard) -> tuple[Launch, Value] | None:
        # Returns the launch and the device's place in it, if the device begins the launch or the launch id is used
        # again; None for a shard that came late.
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
        # The launch has the id of an earlier one, and its values are counted from 0 again. (Older XLA makes the id from
        # the program and the number of its launches, and the devices forget old counts.)
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
        # Discards the values before `occurrence` and returns the last of them.
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
            # The value is the last of its launch so far, because a device that had begun a later one would have passed
            # over this one. So no value before this one needs it, and it may wait for room.
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
        # Whether other devices may wait for this one.
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
        # Discards the overtaken values that were emitted before `until_ns`.
        for launch in self._launches.values():
            if launch.unfinished:
                values = []
                for value in launch.unfinished_values():
                    if not value.is_overtaken(OVERTAKEN_BY) or value.time_ns >= until_ns:
                        break
                    values.append(value)
                self._close(launch, values)

    def _close(self, launch: Launch, values: Sequence[Value]) -> None:
        # Discards the first unfinished values of a launch and expects no further shards of them.
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
