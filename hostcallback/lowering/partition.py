"""Taps of arrays that the compiler partitions: what becomes of a tap when XLA splits the program over devices.

Under automatic sharding a tap is a custom call of its own name, for which XLA asks `_partition` once it knows how the
operands are sharded. The answer is what each device runs: the platform's tap on its shards, and before them the
device's row of a table that says where its shards lie (see `hostcallback.receiver.sinks.sharding.shard_record`). No
operand is
moved, so no collective is added, but for taps that ask for axes as a whole. Everything the answer depends on is in the
call's text: it is the same in every process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.wire import ArraySpec, encode_prefix

CALL_NAME = "hostcallback_partitioned_tap"

Mesh = Sequence[tuple[int, bool]]
"""Size of each axis of a partly manual mesh, and whether it is manual."""


def call_config(
    target: str,
    devices: int,
    mesh: Mesh,
    *,
    prefix: tuple[int, int] | None = None,
    index: int | None = None,
    predicate: int = 0,
    whole_axes: Sequence[Sequence[int]] = (),
) -> str:
    """What XLA's partitioner has to know of a tap.

    Args:
        target: the custom call that a device makes.
        devices: over how many devices the program is partitioned.
        mesh: inside a shard_map that leaves some axes to the compiler, its mesh; otherwise empty.
        prefix: consumer id and flags of the frame that a native handler emits.
        index: number of the program's Python callback.
        predicate: which of the tapped arrays is that of a check.
        whole_axes: of each array, the axes that every device is to have as a whole; nothing for no axes of any.
    """
    settings: dict[str, Any] = {"target": target, "devices": devices, "mesh": mesh}
    settings |= {"prefix": prefix, "index": index, "predicate": predicate}
    if any(whole_axes):
        settings["whole_axes"] = whole_axes
    return json.dumps(settings)


def split_mesh(devices: int, mesh: Mesh) -> tuple[list[int], list[int]]:
    """For each partition its group (its place on the manual axes), and its place within the group.

    Partitions are numbered along the mesh, the last axis fastest.
    """
    groups, members = [0] * devices, list(range(devices))
    if mesh:
        for partition, place in enumerate(np.ndindex(*(size for size, _ in mesh))):
            group = member = 0
            for coordinate, (size, manual) in zip(place, mesh, strict=True):
                if manual:
                    group = group * size + coordinate
                else:
                    member = member * size + coordinate
            groups[partition], members[partition] = group, member
    return groups, members


def shard_starts(
    rank: int, tile: Sequence[int], sharding: Any, members: Sequence[int]
) -> list[tuple[int, ...]]:
    """Where each partition's shard of an array starts.

    Args:
        rank: of the array.
        tile: the shards' shape; those at the end may be padded to it.
        sharding: XLA's `HloSharding` of the array: of all partitions, or of one group's.
        members: for each partition its place within its group.
    """
    if sharding.is_replicated() or sharding.is_manual():
        return [(0,) * rank] * len(members)
    # The partitions, in an array with one dimension for each of the tapped array's, and more for those that hold the
    # same shard or are of other groups.
    assignment = np.reshape(sharding.tile_assignment_devices(), sharding.tile_assignment_dimensions())
    starts = {
        int(partition): tuple(c * n for c, n in zip(coordinates, tile, strict=False))
        for coordinates, partition in np.ndenumerate(assignment)
    }
    if len(starts) == len(members):
        return [starts[partition] for partition in range(len(members))]
    return [starts[member] for member in members]


def shard_table(
    shapes: Sequence[Sequence[int]], starts: Sequence[Sequence[Sequence[int]]], groups: Sequence[int]
) -> np.ndarray[Any, Any]:
    """The shard records of all partitions.

    Args:
        shapes: of the whole arrays.
        starts: for each array, where each partition's shard starts.
        groups: each partition's group.

    Returns:
        int64, shape [partitions, numbers].
    """
    shards = len(groups) // (max(groups) + 1)
    return np.array(
        [
            shard_record(
                [(shape, start[partition]) for shape, start in zip(shapes, starts, strict=True)],
                shards=shards, group=group, partition=partition,
            )
            for partition, group in enumerate(groups)
        ],
        np.int64,
    )  # fmt: skip


def _partition(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], _: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # Called by XLA while it compiles, on a thread of its own.
    settings = json.loads(config)
    groups, members = split_mesh(settings["devices"], settings["mesh"])
    token_sharding, *shardings = arg_shardings
    # What lies on one device only is handed to all of them.
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
    table = shard_table(shapes, starts, groups)
    attributes: dict[str, Any] = {}
    if settings["prefix"] is not None:
        consumer_id, flags = settings["prefix"]
        specs = [ArraySpec.of(np.dtype(np.int64), table.shape[1:])]
        specs += [ArraySpec.of(dtype, tile) for dtype, tile in zip(dtypes, tiles, strict=True)]
        attributes["prefix"] = compat.uint8_attribute(
            encode_prefix(consumer_id, flags, specs, 1 + settings["predicate"])
        )
    else:
        attributes["index"] = np.uint64(settings["index"])
    module = compat.tap_of_a_partition(
        settings["target"], attributes, table, list(zip(tiles, dtypes, strict=True)),
        with_partition=settings["prefix"] is None,
    )  # fmt: skip
    return module, [token_sharding, *shardings], result_sharding


compat.register_partitioner(CALL_NAME, _partition)
