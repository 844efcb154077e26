"""Partitions taps when XLA splits a program over devices.

Under automatic sharding a tap is a custom call named `CALL_NAME`, for which XLA calls `_partition` once it knows the
sharding of the operands. The result is the code of each device: the platform's tap on its shards, and before them the
device's row of a table with the indices of its shards (see `hostcallback.receiver.sinks.sharding.shard_record`). No
operand is moved, so no collective is added, except for taps with `whole_axes`. The result depends only on the call's
text, so it is equal in all processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.primitives.effects import TapEffect
from hostcallback.receiver.sinks.sharding.shard_record import ProcessShare, shard_record
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import encode_prefix

CALL_NAME = "hostcallback_partitioned_tap"
KEPT_NAME = "hostcallback_kept_result"
"""Name of the calls that only read a result; their configuration is the target that each device calls."""

Mesh = Sequence[tuple[int, bool]]
"""Per axis of a partly manual mesh: its size, and whether it is manual."""


def call_config(
    target: str,
    devices: int,
    mesh: Mesh,
    *,
    prefix: tuple[int, int] | None = None,
    index: int | None = None,
    predicate: int = 0,
    whole_axes: Sequence[Sequence[int]] = (),
    processes: Sequence[int] = (),
) -> str:
    """Returns the configuration of a tap for `_partition`, as text.

    Args:
        target: name of the custom call that a device makes.
        devices: number of devices over which the program is partitioned.
        mesh: inside a shard_map that leaves some axes to the compiler, its mesh; otherwise empty.
        prefix: consumer id and flags of the frame that a native handler emits.
        index: number of the program's Python callback.
        predicate: index of a check's predicate among the tapped arrays.
        whole_axes: per array, the axes that every device gets as a whole; empty for none.
        processes: the process of each device; empty if all devices belong to one process.
    """
    settings: dict[str, Any] = {"target": target, "devices": devices, "mesh": mesh}
    settings |= {"prefix": prefix, "index": index, "predicate": predicate}
    if any(whole_axes):
        settings["whole_axes"] = whole_axes
    if len(set(processes)) > 1:
        settings["processes"] = list(processes)
    return json.dumps(settings)


def _with_own_processes(ctx: compat.LoweringRuleContext, config: str) -> str:
    # A program may be exported on devices of one process and called on those of several, or the other way round. Its
    # readers take the values for shared by several processes if its description or a shard record says so.
    settings = json.loads(config)
    devices = compat.LoweringContext(ctx).devices() or ()
    processes = [device.process_index for device in devices]
    if len(set(processes)) > 1 or (processes and "processes" in settings):
        settings["processes"] = processes
    return json.dumps(settings)


def split_mesh(devices: int, mesh: Mesh) -> tuple[list[int], list[int]]:
    """Returns per partition its group (its index on the manual axes), and its index within the group.

    Partitions are numbered along the mesh, the last axis fastest.
    """
    groups, members = [0] * devices, list(range(devices))
    if mesh:
        for partition, index in enumerate(np.ndindex(*(size for size, _ in mesh))):
            group = member = 0
            for coordinate, (size, manual) in zip(index, mesh, strict=True):
                if manual:
                    group = group * size + coordinate
                else:
                    member = member * size + coordinate
            groups[partition], members[partition] = group, member
    return groups, members


def shard_starts(
    rank: int, tile: Sequence[int], sharding: Any, members: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns per partition the start of its shard of an array.

    Args:
        rank: rank of the array.
        tile: the shards' shape; shards at the end may be padded to it.
        sharding: XLA's `HloSharding` of the array, over all partitions or over those of one group.
        members: per partition its index within its group.
    """
    if sharding.is_replicated() or sharding.is_manual():
        return [(0,) * rank] * len(members)
    # An array of the partitions with the dimensions of the tapped array, and further dimensions for partitions that
    # hold the same shard or belong to other groups.
    assignment = np.reshape(sharding.tile_assignment_devices(), sharding.tile_assignment_dimensions())
    starts = {
        int(partition): tuple(c * n for c, n in zip(coordinates, tile, strict=False))
        for coordinates, partition in np.ndenumerate(assignment)
    }
    # Otherwise the sharding is of one group of a partly manual mesh, and its numbers are indices within the
    # group.
    if len(starts) == len(members):
        return [starts[partition] for partition in range(len(members))]
    return [starts[member] for member in members]


def shard_table(
    shapes: Sequence[Sequence[int]],
    starts: Sequence[Sequence[Sequence[int]]],
    groups: Sequence[int],
    processes: Sequence[int] = (),
) -> np.ndarray[Any, Any]:
    """Returns the shard records of all partitions.

    Args:
        shapes: shapes of the whole arrays.
        starts: per array and partition, the start of the shard.
        groups: per partition, its group.
        processes: per partition, its process; empty if there is one process.

    Returns:
        int64, shape [partitions, numbers].
    """
    shards = len(groups) // (max(groups) + 1)
    shares = process_shares(starts, groups, processes) if processes else [None] * len(groups)
    return np.array(
        [
            shard_record(
                [(shape, start[partition]) for shape, start in zip(shapes, starts, strict=True)],
                shards=shards, group=group, partition=partition, share=share,
            )
            for partition, (group, share) in enumerate(zip(groups, shares, strict=True))
        ],
        np.int64,
    )  # fmt: skip


def _partition(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], _: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # XLA calls this on one of its threads while it compiles.
    settings = json.loads(config)
    groups, members = split_mesh(settings["devices"], settings["mesh"])
    token_sharding, *shardings = arg_shardings
    # An operand on a single device is replicated to all devices.
    shardings = [compat.REPLICATED if s.is_maximal() else s for s in shardings]
    shapes = [tuple(s.dimensions()) for s in arg_shapes[1:]]
    if "whole_axes" in settings:
        shardings = [
            compat.sharding_without(sharding, len(shape), axes)
            for sharding, shape, axes in zip(shardings, shapes, settings["whole_axes"], strict=True)
        ]
    dtypes = [np.dtype(s.numpy_dtype()) for s in arg_shapes[1:]]
    tiles = [
        tuple(sharding.tile(shape).dimensions())
        for sharding, shape in zip(shardings, arg_shapes[1:], strict=True)
    ]
    starts = [
        shard_starts(len(shape), tile, sharding, members)
        for shape, tile, sharding in zip(shapes, tiles, shardings, strict=True)
    ]
    table = shard_table(shapes, starts, groups, settings.get("processes", ()))
    attributes: dict[str, Any] = {}
    if settings["prefix"] is not None:
        consumer_id, flags = settings["prefix"]
        specs = [ArraySpec.of(np.dtype(np.int64), table.shape[1:])]
        specs += [ArraySpec.of(dtype, tile) for dtype, tile in zip(dtypes, tiles, strict=True)]
        prefix = encode_prefix(consumer_id, flags, specs, 1 + settings["predicate"])
        attributes["prefix"] = np.frombuffer(prefix, np.uint8)
    else:
        attributes["index"] = np.uint64(settings["index"])
    module = compat.tap_of_a_partition(
        settings["target"], attributes, table, list(zip(tiles, dtypes, strict=True)),
        with_partition=settings["prefix"] is None,
    )  # fmt: skip
    return module, [token_sharding, *shardings], result_sharding


def _partition_kept(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], _: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # As `_partition`: each device calls the target with its part.
    shardings = [compat.REPLICATED if s.is_maximal() else s for s in arg_shardings[1:]]
    operands = [
        (tuple(sharding.tile(shape).dimensions()), np.dtype(shape.numpy_dtype()))
        for sharding, shape in zip(shardings, arg_shapes[1:], strict=True)
    ]
    return (
        compat.call_of_a_partition(config.decode(), operands),
        [arg_shardings[0], *shardings],
        result_sharding,
    )


compat.register_partitioner(CALL_NAME, _partition)
compat.register_partitioner(KEPT_NAME, _partition_kept)
compat.rewrite_in_exported(CALL_NAME, TapEffect, _with_own_processes)


# ---- What each process has of a value that is partitioned over the devices of several --------------------------------

Tile = tuple[tuple[int, ...], ...]
"""The starts of one device's shards, an entry per array. Shards of an array have one shape, so equal starts are equal
shards."""


def process_shares(
    starts: Sequence[Sequence[Sequence[int]]], groups: Sequence[int], processes: Sequence[int]
) -> list[ProcessShare]:
    """Returns, per partition, the share of the value that the partition's process holds.

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
