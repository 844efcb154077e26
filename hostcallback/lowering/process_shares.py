"""What each process has of a value that the compiler partitions over the devices of several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostcallback.receiver.sinks.sharding.shard_record import ProcessShare

Tile = tuple[tuple[int, ...], ...]
"""The starts of one device's shards, an entry per array. Shards of an array have one shape, so equal starts are equal
shards."""


def process_shares(
    starts: Sequence[Sequence[Sequence[int]]], groups: Sequence[int], processes: Sequence[int]
) -> list[ProcessShare]:
    """Returns per partition what its process has of the partition's value.

    Args:
        starts: per array and partition, the start of the shard.
        groups: per partition, its group. Each group has a value.
        processes: per partition, its process. The first process is that of the first partition.
    """
    by_group: dict[int, list[int]] = {}
    for partition, group in enumerate(groups):
        by_group.setdefault(group, []).append(partition)
    found: dict[int, ProcessShare] = {}
    for partitions in by_group.values():
        tiles = [tuple(tuple(start[partition]) for start in starts) for partition in partitions]
        shares = _shares([processes[partition] for partition in partitions], tiles)
        found.update(zip(partitions, shares, strict=True))
    return [found[partition] for partition in range(len(groups))]


def _shares(processes: Sequence[int], tiles: Sequence[Tile]) -> Iterator[ProcessShare]:
    tiles_of: dict[int, list[Tile]] = {}
    for process, tile in zip(processes, tiles, strict=True):
        tiles_of.setdefault(process, []).append(tile)
    # The shards of all processes together make the whole arrays.
    everything = [set(column) for column in zip(*tiles, strict=True)]
    local = {
        process: len(own)
        for process, own in tiles_of.items()
        if [set(column) for column in zip(*own, strict=True)] == everything
    }
    with_whole = next(iter(local), None)
    first: dict[Tile, int] = {}
    seen: set[tuple[int, Tile]] = set()
    for process, tile in zip(processes, tiles, strict=True):
        has_it_first = first.setdefault(tile, process) if with_whole is None else with_whole
        yield ProcessShare(local.get(process, 0), process != has_it_first, (process, tile) in seen)
        seen.add((process, tile))
