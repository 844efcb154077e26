"""Launches of programs, and the values in them of which shards have come: the table of `assembly`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.sharding.shard_record import Array, Shard


class Device:
    """How far a device has come in its stream, as one partition of programs over the same devices.

    Attributes:
        begun: how many launches it has begun.
        shared: of these, the last that all devices have begun.
    """

    __slots__ = ("begun", "shared")

    def __init__(self) -> None:
        """It has begun none."""
        self.begun = 0
        self.shared = 0


_NO_DEVICE = Device()


class Value:
    """A value of which shards have come, in its launch's list.

    Attributes:
        occurrence: its number in the launch.
        missing: how many devices have neither brought a shard of it nor passed it over.
        device: the one whose shard came first, and `begun`: in which of its launches.
        time_ns: when that was emitted.
        next: the value behind it in the launch.
        arrays: as far as they have come; None once it was handed out or given up.
        shapes: theirs.
        nbytes: theirs.
        lead: what it takes from the message of one device: all but the consumer and the arrays.
        lead_partition: that device's.
    """

    __slots__ = (
        "arrays",
        "begun",
        "device",
        "lead",
        "lead_partition",
        "missing",
        "nbytes",
        "next",
        "occurrence",
        "shapes",
        "time_ns",
    )

    def __init__(self, occurrence: int, missing: int, device: Device, time_ns: int) -> None:
        """Without arrays."""
        self.occurrence = occurrence
        self.missing = missing
        self.device, self.begun = device, device.begun
        self.time_ns = time_ns
        self.next: Value | None = None
        self.arrays: list[Array] | None = None

    def is_overtaken(self, by: int) -> bool:
        """Whether all its devices have begun so many later launches."""
        return self.device.shared - self.begun >= by

    def begin(self, shard: Shard) -> None:
        """Makes room for its arrays; the first shard has come."""
        self.shapes = shard.layout.shapes
        self.arrays = [
            # One that is whole in a message is taken over from there.
            array if array.shape == shape else np.empty(shape, array.dtype)
            for array, shape in zip(shard.arrays, self.shapes, strict=True)
        ]
        self.nbytes = sum([array.nbytes for array in self.arrays])
        self.lead: tuple[Any, ...] = shard.message[2:]
        self.lead_partition = shard.layout.partition


class Launch:
    """What the devices have emitted in one launch: a list linked in order of occurrence, in which each has its place.

    What is behind all devices, nothing refers to any more.

    Attributes:
        number: of the launch among all.
        first: where devices begin; None when all have.
        at: by partition, the value that it brought or passed over last.
        devices: by partition, the device, and which of its launches this is.
        unfinished: how many values are missing something.
        closed: up to this occurrence, all values were given up while
        moved: these devices could still bring shards of them.
    """

    __slots__ = ("at", "closed", "devices", "first", "moved", "number", "unfinished")

    def __init__(self, number: int) -> None:
        """Nobody has begun it."""
        self.number = number
        self.first: Value | None = Value(-1, 0, _NO_DEVICE, 0)
        self.at: dict[int, Value] = {}
        self.devices: dict[int, tuple[Device, int]] = {}
        self.unfinished = 0
        self.closed = -1
        self.moved: frozenset[int] = frozenset()

    def is_behind(self, partition: int) -> bool:
        """Whether others have brought values that this device has not."""
        at = self.at.get(partition, self.first)
        return at is not None and at.next is not None

    def unfinished_values(self) -> Iterator[Value]:
        """Those that are missing something, in order."""
        value = self.first or min(self.at.values(), key=lambda value: value.occurrence)
        while value.next is not None:
            value = value.next
            if value.missing:
                yield value

    def close(self, last: Value) -> None:
        """Moves all devices to `last`, unless they are beyond it."""
        self.closed = last.occurrence
        behind = [partition for partition, at in self.at.items() if at.occurrence < last.occurrence]
        self.at.update(dict.fromkeys(behind, last))
        self.moved = self.moved.union(behind)
        if self.first is not None:
            self.first = last
