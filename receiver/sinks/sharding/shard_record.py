"""The shard record: where the arrays of a message lie in the whole arrays that a compiler partitioned over devices.

It is the first array of such a message, int64:

    [occurrence, shards, group, partition, then for every dimension of every array: size of the whole, start here]

`occurrence` counts the messages of one launch on one device: messages with equal run id, group and occurrence are the
shards of one value. On each device it grows from message to message, not always by one: taps may share a count.
`shards` is how many shards there are, `group` which of several such values they are part of (where a partially manual
shard_map makes the program run once per group), `partition` the number of the emitting device within the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages.message import Index, Message

PLACES_FROM = 4
"""Where in a shard record the dimensions begin."""

MAX_KNOWN = 1024
"""How many different records a reader remembers: a tap has one for each device and each shape."""

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


def shard_record(
    places: Sequence[tuple[Sequence[int], Sequence[int]]], *, shards: int, group: int, partition: int
) -> list[int]:
    """The numbers of a shard record with occurrence 0, from each array's whole shape and this shard's start."""
    numbers = [
        number for shape, start in places for pair in zip(shape, start, strict=True) for number in pair
    ]
    return [0, shards, group, partition, *numbers]


class Layout(NamedTuple):
    """What a shard record says, but for the occurrence, with the shapes of the arrays that came with it.

    Attributes:
        shards: how many shards a value has.
        group: which of several values of one occurrence this is a shard of.
        partition: the number of the emitting device within the program.
        tiles: the shapes of the arrays as they come; those at a dimension's end may be padded.
        shapes: those of the whole arrays.
        places: where the arrays lie in them, without padding.
        inside: the index of what is no padding in each array; None if there is no padding at all.
        can_be_whole: whether so many shards of these shapes make up the whole arrays. Logs have shards alone, too.
    """

    shards: int
    group: int
    partition: int
    tiles: list[Shape]
    shapes: tuple[Shape, ...]
    places: Index
    inside: list[tuple[slice | EllipsisType, ...]] | None
    can_be_whole: bool


class Shard(NamedTuple):
    """A message with a shard record, taken apart.

    Attributes:
        message: as it came.
        layout: what the record says.
        occurrence: the value that it is a shard of.
        arrays: those behind the record, without padding.
    """

    message: Message
    layout: Layout
    occurrence: int
    arrays: list[Array]


_tuple_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class RecordReader:
    """Reads the shard records of one tap, most of which it has read before. Any thread."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Starts with nothing remembered."""
        self._known: dict[bytes, Layout] = {}  # by the record's bytes after the occurrence

    def read(self, message: Message) -> Shard:
        """Takes a message apart.

        Raises:
            ValueError: its first array is no shard record, or not that of the others.
        """
        if not message.arrays:
            raise ValueError("a message of shards came without arrays, expected a shard record first")
        record, *parts = message.arrays
        key = record.tobytes()[8:]
        layout = self._known.get(key)
        if layout is None or [part.shape for part in parts] != layout.tiles:
            layout = _layout(record, parts)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = layout
        if layout.inside is not None:
            parts = [part[inside] for part, inside in zip(parts, layout.inside, strict=True)]
        return _tuple_new(Shard, (message, layout, record.item(0), parts))


def _layout(record: Array, parts: Sequence[Array]) -> Layout:
    tiles = [part.shape for part in parts]
    expected = PLACES_FROM + 2 * sum(map(len, tiles))
    if record.dtype != np.int64 or record.shape != (expected,):
        raise ValueError(
            f"a shard record of dtype {record.dtype} and shape {record.shape} came with arrays of shapes {tiles}, "
            f"expected int64 of shape ({expected},): the program and this process are of different versions of "
            "hostcallback"
        )
    _, shards, group, partition, *places = record.tolist()
    if shards < 1 or partition < 0 or min(places, default=0) < 0:
        raise ValueError(
            f"a shard record has {shards} shards, partition {partition} and the sizes and starts {places}, expected at "
            "least one shard and nothing negative: the message is damaged"
        )
    numbers = iter(places)
    per_array = [list(_ranges(tile, numbers)) for tile in tiles]
    # With an ellipsis, since a number is no longer an array when it is indexed by nothing.
    inside: list[tuple[slice | EllipsisType, ...]] = [
        (*(slice(stop - start) for _, start, stop in ranges), ...) for ranges in per_array
    ]
    padded = any(part[rows].shape != part.shape for part, rows in zip(parts, inside, strict=True))
    return Layout(
        shards,
        group,
        partition,
        tiles,
        tuple(tuple(size for size, _, _ in ranges) for ranges in per_array),
        tuple(tuple(slice(start, stop) for _, start, stop in ranges) for ranges in per_array),
        inside if padded else None,
        all(
            size <= shards * math.prod(tile) for tile, size in zip(tiles, _sizes(tiles, places), strict=True)
        ),
    )


def _sizes(tiles: Sequence[Shape], places: Sequence[int]) -> Iterator[int]:
    # Of the whole arrays, in elements.
    at = 0
    for tile in tiles:
        yield math.prod(places[at : at + 2 * len(tile) : 2])
        at += 2 * len(tile)


def _ranges(tile: Shape, numbers: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    # For each dimension the whole's size, and where the shard starts and stops. Where a dimension does not divide
    # evenly, the last shards are padded, or wholly padding.
    for length in tile:
        size, start = next(numbers), next(numbers)
        yield size, min(start, size), min(start + length, size)
