"""Launches of programs, their incomplete values, and the order in which threads complete them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.sharding.shard_record import Shard
from hostcallback.receiver.wire.array_types import Array


class Device:
    """Progress of one device (partition) in the stream of programs over the same devices.

    Attributes:
        begun: number of launches that it has begun.
        shared: number, in its own count, of the last launch that all devices have begun.
    """

    __slots__ = ("begun", "shared")

    def __init__(self) -> None:
        """Starts before the first launch."""
        self.begun = 0
        self.shared = 0


_NO_DEVICE = Device()


class Value:
    """A value of which shards have come: a node in its launch's linked list.

    Attributes:
        occurrence: its number in the launch.
        missing: number of devices that have neither brought a shard of it nor passed over it.
        device: the device whose shard came first.
        begun: the number of that device's launch.
        time_ns: Unix time at which that shard was emitted.
        next: the next value in the launch.
        arrays: the whole arrays, as far as their shards have come; None once the value is delivered or discarded.
        shapes: shapes of the whole arrays.
        nbytes: bytes of the whole arrays.
        lead: fields of the leading device's message other than the consumer and the arrays.
        lead_partition: partition of the leading device.
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
        """Makes a value without arrays."""
        self.occurrence = occurrence
        self.missing = missing
        self.device, self.begun = device, device.begun
        self.time_ns = time_ns
        self.next: Value | None = None
        self.arrays: list[Array] | None = None

    def is_overtaken(self, by: int) -> bool:
        """Whether all its devices have begun at least `by` later launches."""
        return self.device.shared - self.begun >= by

    def begin(self, shard: Shard) -> None:
        """Allocates the whole arrays when the first shard has come."""
        self.shapes = shard.layout.shapes
        self.arrays = [
            # An array that is whole in the message is used without a copy.
            array if array.shape == shape else np.empty(shape, array.dtype)
            for array, shape in zip(shard.arrays, self.shapes, strict=True)
        ]
        self.nbytes = sum([array.nbytes for array in self.arrays])
        self.lead: tuple[Any, ...] = shard.message[2:]
        self.lead_partition = shard.layout.partition


class Launch:
    """The values of one launch: a list linked in order of occurrence, in which each device has a place.

    Values that every device has passed are no longer referenced and can be freed.

    Attributes:
        number: number of the launch among all.
        first: place of devices that have not begun; None once all have.
        at: by partition, the value that it brought or passed over last.
        devices: by partition, the device and the number of this launch in the device's count.
        unfinished: number of values with missing shards.
        closed: occurrence up to which all values were discarded.
        moved: partitions that could still bring shards of the values up to `closed`.
    """

    __slots__ = ("at", "closed", "devices", "first", "moved", "number", "unfinished")

    def __init__(self, number: int) -> None:
        """Makes a launch that no device has begun."""
        self.number = number
        self.first: Value | None = Value(-1, 0, _NO_DEVICE, 0)
        self.at: dict[int, Value] = {}
        self.devices: dict[int, tuple[Device, int]] = {}
        self.unfinished = 0
        self.closed = -1
        self.moved: frozenset[int] = frozenset()

    def is_behind(self, partition: int) -> bool:
        """Whether other devices have brought values that this one has not."""
        at = self.at.get(partition, self.first)
        return at is not None and at.next is not None

    def unfinished_values(self) -> Iterator[Value]:
        """Yields the values with missing shards, in order."""
        value = self.first or min(self.at.values(), key=lambda value: value.occurrence)
        while value.next is not None:
            value = value.next
            if value.missing:
                yield value

    def close(self, last: Value) -> None:
        """Moves all devices that are before `last` to `last`."""
        self.closed = last.occurrence
        behind = [partition for partition, at in self.at.items() if at.occurrence < last.occurrence]
        self.at.update(dict.fromkeys(behind, last))
        self.moved = self.moved.union(behind)
        if self.first is not None:
            self.first = last


class TicketQueue:
    """A queue of tickets. Any thread.

    A thread that takes a ticket must `release` it, also after an error, because all later tickets wait for that.
    """

    def __init__(self) -> None:
        """Starts without tickets."""
        self.reset()

    def reset(self) -> None:
        """Drops all tickets, for a forked child, which does not have the parent's threads."""
        self._lock = threading.Lock()  # protects _tickets
        self._changed = threading.Condition(self._lock)
        self._tickets: deque[object] = deque()

    def __len__(self) -> int:
        """Returns the number of tickets that are not released, including the one whose turn it is."""
        return len(self._tickets)

    def issue(self) -> object:
        """Returns a ticket after all others."""
        ticket = object()
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: object) -> None:
        """Waits until all tickets before this one are released."""
        tickets = self._tickets
        if tickets[0] is not ticket:
            with self._changed:
                self._changed.wait_for(lambda: tickets[0] is ticket)

    def release(self, ticket: object) -> None:
        """Releases a ticket, after its turn or instead of it."""
        with self._lock:
            if ticket in self._tickets:  # a forked child may have dropped it
                self._tickets.remove(ticket)
            if self._tickets:
                self._changed.notify_all()
