"""The partitioner's places of shards match JAX's, for meshes, groups and shardings of every kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hostcallback import _jax_compat as compat
from hostcallback.lowering.partition import shard_starts, shard_table, split_mesh
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks.sharding.shard_record import PLACES_FROM, shard_record
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1), (1, 3), (2, 1, 2), (1, 2, 2), (2, 2, 1)]
ORDERS = {"in order": lambda devices: devices, "shuffled": lambda devices: [*devices[2:], *devices[1::-1]]}


def mesh_of(shape: Sequence[int], devices: Sequence[Any] | None = None) -> Mesh:
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), tuple("ijk"[: len(shape)]))


def specs(axes: Sequence[str], rank: int) -> Iterator[P]:
    """Every way to spread mesh axes over an array's dimensions; several on one come in either order."""
    for places in itertools.product([None, *range(rank)], repeat=len(axes)):
        dims = [[a for a, place in zip(axes, places, strict=True) if place == dim] for dim in range(rank)]
        for order in {1, -1} if any(len(dim) > 1 for dim in dims) else {1}:
            yield P(*(tuple(dim[::order]) or None for dim in dims))


def xla_sharding(sharding: NamedSharding, rank: int) -> Any:
    """The sharding in the partitioner's form. JAX has no public conversion."""
    return sharding._to_xla_hlo_sharding(rank)


def parts(mesh: Mesh, spec: P) -> list[int]:
    """Into how many parts each dimension falls."""
    return [math.prod(mesh.shape[axis] for axis in (names or ())) for names in spec]


def starts_by_jax(sharding: NamedSharding, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Start of each partition's shard: partitions are numbered along the mesh."""
    indices = sharding.devices_indices_map(tuple(shape))
    return [tuple(part.start or 0 for part in indices[device]) for device in sharding.mesh.devices.flat]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_shards_start_where_jax_puts_them(mesh_shape: tuple[int, ...], order: str, rank: int) -> None:
    mesh = mesh_of(mesh_shape, ORDERS[order](jax.devices()) if math.prod(mesh_shape) == 4 else None)
    members = list(range(mesh.size))
    for spec in specs(mesh.axis_names, rank):
        sharding = NamedSharding(mesh, spec)
        shape = [3 * n for n in parts(mesh, spec)]
        tile = sharding.shard_shape(tuple(shape))
        expected = starts_by_jax(sharding, shape)
        assert shard_starts(rank, tile, xla_sharding(sharding, rank), members) == expected, spec
        # Where a dimension does not divide evenly, all shards but the last ones are as long as the first.
        tile = tuple(2 for _ in tile)
        uneven = [tuple(start // 3 * 2 for start in place) for place in expected]
        assert shard_starts(rank, tile, xla_sharding(sharding, rank), members) == uneven, spec


def test_replicated_and_manual_shards_start_at_the_beginning() -> None:
    assert shard_starts(2, (8, 8), compat.REPLICATED, range(4)) == [(0, 0)] * 4
    sharding = NamedSharding(mesh_of((2, 2)), P())
    assert shard_starts(2, (8, 8), xla_sharding(sharding, 2), range(4)) == [(0, 0)] * 4
    assert shard_starts(0, (), xla_sharding(sharding, 0), range(4)) == [()] * 4


MANUAL = [
    (shape, manual)
    for shape in MESHES
    for manual in itertools.product([False, True], repeat=len(shape))
    if any(manual) and not all(manual)
]


def test_without_a_mesh_all_partitions_are_one_group() -> None:
    assert split_mesh(4, []) == ([0, 0, 0, 0], [0, 1, 2, 3])


@pytest.mark.parametrize(("shape", "manual"), MANUAL, ids=str)
def test_a_group_is_a_place_on_the_manual_axes(shape: tuple[int, ...], manual: tuple[bool, ...]) -> None:
    devices = math.prod(shape)
    groups, members = split_mesh(devices, list(zip(shape, manual, strict=True)))
    numbers = np.arange(devices).reshape(shape)
    # With the manual axes first, each group is a row, and its members are numbered along it.
    by_hand = [axis for axis, is_manual in enumerate(manual) if is_manual]
    left = [axis for axis, is_manual in enumerate(manual) if not is_manual]
    rows = numbers.transpose([*by_hand, *left]).reshape(math.prod(shape[a] for a in by_hand), -1)
    for group, row in enumerate(rows.tolist()):
        for member, partition in enumerate(row):
            assert (groups[partition], members[partition]) == (group, member)
    assert len(groups) == len(members) == rows.size


@pytest.mark.parametrize(("shape", "manual"), MANUAL, ids=str)
def test_shards_in_a_group_start_alike_whether_xla_names_all_partitions_or_one_groups(
    shape: tuple[int, ...], manual: tuple[bool, ...]
) -> None:
    mesh = mesh_of(shape)
    _, members = split_mesh(mesh.size, list(zip(shape, manual, strict=True)))
    left = [axis for axis, is_manual in zip(mesh.axis_names, manual, strict=True) if not is_manual]
    sizes = [mesh.shape[axis] for axis in left]
    group = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(left))
    for spec in specs(left, 2):
        whole = [2 * n for n in parts(mesh, spec)]
        of_all, of_group = NamedSharding(mesh, spec), NamedSharding(group, spec)
        expected = starts_by_jax(of_all, whole)
        assert shard_starts(2, (2, 2), xla_sharding(of_all, 2), members) == expected, spec
        assert shard_starts(2, (2, 2), xla_sharding(of_group, 2), members) == expected, spec


def test_the_table_has_a_record_for_each_partition() -> None:
    table = shard_table([(4, 6), ()], [[(0, 0), (2, 0), (0, 3), (2, 3)], [()] * 4], [0, 1, 0, 1])
    assert table.dtype == np.int64
    assert table.tolist() == [
        shard_record([((4, 6), start), ((), ())], shards=2, group=partition % 2, partition=partition)
        for partition, start in enumerate([(0, 0), (2, 0), (0, 3), (2, 3)])
    ]
    assert table[3].tolist() == [0, 2, 1, 3, 4, 2, 6, 3]
    assert table.shape == (4, PLACES_FROM + 4)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_the_receiver_reassembles_arrays_jax_split(mesh_shape: tuple[int, ...]) -> None:
    mesh = mesh_of(mesh_shape)
    consumer = Consumer(1, "tap", "here:1 (f)", lambda message: None)
    members = list(range(mesh.size))
    for one, other in itertools.product(specs(mesh.axis_names, 1), specs(mesh.axis_names, 2)):
        got: list[Message] = []
        sink = AssemblingSink(got.append)
        wholes, shardings = [], [NamedSharding(mesh, one), NamedSharding(mesh, other)]
        for sharding in shardings:
            shape = [2 * n for n in parts(mesh, sharding.spec)]
            wholes.append(np.arange(math.prod(shape)).reshape(shape))
        starts = [
            shard_starts(s.ndim, sharding.shard_shape(s.shape), xla_sharding(sharding, s.ndim), members)
            for s, sharding in zip(wholes, shardings, strict=True)
        ]
        table = shard_table([whole.shape for whole in wholes], starts, [0] * mesh.size)
        for partition, device in reversed(list(enumerate(mesh.devices.flat))):
            arrays = [
                whole[sharding.devices_indices_map(whole.shape)[device]].copy()
                for whole, sharding in zip(wholes, shardings, strict=True)
            ]
            sink(Message(consumer, [table[partition], *arrays], 0, 0, 0, device, None))
        (message,) = got
        assert message.device is mesh.devices.flat[0]
        for whole, array in zip(wholes, message.arrays, strict=True):
            np.testing.assert_array_equal(array, whole)
