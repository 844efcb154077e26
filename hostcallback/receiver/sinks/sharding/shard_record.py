"""The shard record: the places of a message's arrays in the whole arrays that the compiler partitioned over devices.

It is the first array of such a message, int64:

    [occurrence, shards, group, partition, then for every dimension of every array: size of the whole, start here,
     and in a program of several processes: local, is_later, is_copy]

`occurrence` counts the messages of one launch on one device: messages with equal run id, group and occurrence are the
shards of one value. On each device it grows from message to message, but not always by one, because taps may share a
count. `shards` is the number of shards; `group` distinguishes several such values (a partially manual shard_map makes
the program run once per group); `partition` is the number of the emitting device within the program.

The last three numbers say which of the shards one process sees. `local` is the number of shards of the device's process
if these make the whole arrays; 0 if they do not. `is_later` is 1 if an earlier process has the same: the whole arrays,
or this shard. `is_copy` is 1 if an earlier device of this process has the same shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from hostcallback.receiver.messages import Index, Message
from hostcallback.receiver.wire.array_types import Array

PLACES_FROM = 4
"""Index in a shard record at which the dimensions begin."""

MAX_KNOWN = 1024
"""Number of different records that a reader caches. A tap has one per device and shape."""

Shape = tuple[int, ...]


class ProcessShare(NamedTuple):
    """The share of a value that one process holds, as stated in a shard record of one of its devices.

    Attributes:
        local: number of shards of this process if they make the whole arrays; 0 if they do not.
        is_later: whether an earlier process has the same: the whole arrays, or this shard.
        is_copy: whether an earlier device of this process has the same shard.
    """

    local: int = 0
    is_later: bool = False
    is_copy: bool = False


ALONE = ProcessShare()
"""The share in records that do not say it: of programs of one process, and of earlier versions."""


def shard_record(
    places: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    shards: int,
    group: int,
    partition: int,
    share: ProcessShare | None = None,
) -> list[int]:
    """Returns a shard record with occurrence 0, from each array's whole shape and this shard's start."""
    numbers = [
        number for shape, start in places for pair in zip(shape, start, strict=True) for number in pair
    ]
    return [0, shards, group, partition, *numbers, *map(int, share or ())]


def says_share(record: Array, parts: Sequence[Array]) -> bool:
    """Whether a record with these `parts` states its process's share, as in programs of several processes."""
    return record.size == PLACES_FROM + 2 * sum(part.ndim for part in parts) + len(ALONE)


class Layout(NamedTuple):
    """A decoded shard record without the occurrence, with the shapes of the arrays that came with it.

    Attributes:
        shards: number of shards of a value.
        group: number of the value among several values of one occurrence.
        partition: the number of the emitting device within the program.
        tiles: the shapes of the arrays in the message; arrays at a dimension's end may be padded.
        shapes: the shapes of the whole arrays.
        places: the places of the arrays in the whole arrays, without padding.
        inside: the index of each array that removes the padding; None without padding.
        can_be_whole: whether this many shards of these shapes can fill the whole arrays. Damaged messages may have
            shards that cannot, and logs may have some of the shards alone.
        share: what the device's process has of the value.
    """

    shards: int
    group: int
    partition: int
    tiles: list[Shape]
    shapes: tuple[Shape, ...]
    places: Index
    inside: list[tuple[slice | EllipsisType, ...]] | None
    can_be_whole: bool
    share: ProcessShare = ALONE


class Shard(NamedTuple):
    """A message with a decoded shard record.

    Attributes:
        message: the message as it came.
        layout: the decoded record.
        occurrence: the number of its value in the launch.
        arrays: the arrays after the record, without padding.
    """

    message: Message
    layout: Layout
    occurrence: int
    arrays: list[Array]


_tuple_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class RecordReader:
    """Reads the shard records of one tap, with a cache of decoded ones. Any thread."""

    __slots__ = ("_known", "_of_process")

    def __init__(self, *, of_process: bool = False) -> None:
        """Starts with an empty cache.

        `of_process`: whether the layouts of values that one process has as a whole count that process's shards only.
        """
        self._of_process = of_process
        self._known: dict[bytes, Layout] = {}  # by the record's bytes after the occurrence

    def read(self, message: Message) -> Shard:
        """Decodes the shard record of a message.

        Raises:
            ValueError: its first array is not a shard record, or does not fit the other arrays.
        """
        if not message.arrays:
            raise ValueError("a message of shards came without arrays, expected a shard record first")
        record, *parts = message.arrays
        key = record.tobytes()[8:]
        layout = self._known.get(key)
        if layout is None or [part.shape for part in parts] != layout.tiles:
            layout = _layout(record, parts)
            if self._of_process and layout.share.local:
                layout = layout._replace(shards=layout.share.local)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = layout
        if layout.inside is not None:
            parts = [part[inside] for part, inside in zip(parts, layout.inside, strict=True)]
        return _tuple_new(Shard, (message, layout, record.item(0), parts))


def _layout(record: Array, parts: Sequence[Array]) -> Layout:
    tiles = [part.shape for part in parts]
    expected = PLACES_FROM + 2 * sum(map(len, tiles))
    shared = record.shape == (expected + len(ALONE),)
    if record.dtype != np.int64 or not (shared or record.shape == (expected,)):
        raise ValueError(
            f"a shard record of dtype {record.dtype} and shape {record.shape} came with arrays of shapes {tiles}, "
            f"expected int64 of shape ({expected},): the program and this process are of different versions of "
            "hostcallback"
        )
    _, shards, group, partition, *places = record.tolist()
    share = ALONE
    if shared:
        *places, local, is_later, is_copy = places
        share = ProcessShare(local, bool(is_later), bool(is_copy))
    if shards < 1 or partition < 0 or min(places, default=0) < 0 or not 0 <= share.local <= shards:
        raise ValueError(
            f"a shard record has {shards} shards, {share.local} of them in this process, partition {partition} and the "
            f"sizes and starts {places}, expected at least one shard and nothing negative: the message is damaged"
        )
    numbers = iter(places)
    per_array = [list(_ranges(tile, numbers)) for tile in tiles]
    # With an ellipsis, because indexing a 0-dimensional array with () returns a scalar, not an array.
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
            size <= (share.local or shards) * math.prod(tile)
            for tile, size in zip(tiles, _sizes(tiles, places), strict=True)
        ),
        share,
    )


def _sizes(tiles: Sequence[Shape], places: Sequence[int]) -> Iterator[int]:
    # Yields the numbers of elements of the whole arrays.
    at = 0
    for tile in tiles:
        yield math.prod(places[at : at + 2 * len(tile) : 2])
        at += 2 * len(tile)


def _ranges(tile: Shape, numbers: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    # Yields per dimension the size of the whole and the shard's start and stop. If a dimension does not divide evenly,
    # the last shards are padded or consist of padding only.
    for length in tile:
        size, start = next(numbers), next(numbers)
        yield size, min(start, size), min(start + length, size)
