"""In a shard_map that leaves some axes to the compiler, each manual group taps its own array, whole over the others."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from recorder import Recorder


@pytest.mark.parametrize("placement", list(itertools.permutations("ij")), ids="".join)
@pytest.mark.parametrize("manual", ["i", "j"])
def test_each_group_taps_its_part_once(manual: str, placement: tuple[str, ...], rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    x = jax.device_put(whole, NamedSharding(mesh, P(*placement)))
    spec = P(*(name if name == manual else None for name in placement))
    f = jax.shard_map(
        lambda x: hcb.id_tap(rec, x * 2), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={manual}
    )
    np.testing.assert_array_equal(jax.jit(f)(x), 2 * whole)
    hcb.barrier_wait()
    axis = placement.index(manual)
    halves = np.split(2 * whole, 2, axis)
    first = {"i": [0, 2], "j": [0, 1]}[manual]  # the first device of each group
    by_device = {d.id: v for d, v in zip(rec.devices, rec.values, strict=True)}
    assert len(rec) == 2
    assert sorted(by_device) == first
    for device, half in zip(first, halves, strict=True):
        np.testing.assert_array_equal(by_device[device], half)


def test_order_within_each_group(rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))

    def body(x: Any) -> Any:
        x = hcb.id_tap(rec, x, at="first")

        def step(c: Any, i: Any) -> Any:
            c = hcb.id_tap(rec, c + 1, at="scan")
            return hcb.id_tap(rec, c * 1, at="again"), None

        x, _ = lax.scan(step, x, jnp.arange(1500))
        hcb.id_tap(rec, x, at="unused")
        return hcb.id_tap(rec, x, at="last")

    f = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
    jax.jit(f)(jnp.zeros((4, 4)))
    hcb.barrier_wait()
    for device in (jax.devices()[0], jax.devices()[2]):
        places = [k["at"] for k, d in zip(rec.kwargs, rec.devices, strict=True) if d == device]
        in_loop = [place for place in places if place in ("scan", "again")]
        assert in_loop == ["scan", "again"] * 1500
        outside = [place for place in places if place not in ("scan", "again")]
        assert outside == ["first", "unused", "last"]
        # Before JAX 0.12 a loop is not held back by taps before it: docs/design/sharded-taps.md.
        if jax.__version_info__ >= (0, 12):
            assert places == ["first", *in_loop, "unused", "last"]


@pytest.mark.parametrize("kind", ["plain", "jit", "scan", "cond", "call"])
def test_nested_regions_that_are_manual_only_together(kind: str, rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))

    def tap(x: Any) -> Any:
        x = hcb.id_tap(rec, x + 1)
        hcb.check(x > 0, "x is {}", x)
        return x

    bodies: dict[str, Any] = {
        "plain": tap,
        "jit": lambda x: jax.jit(tap)(x),
        "scan": lambda x: lax.scan(lambda c, _: (tap(c), None), x, length=1)[0],
        "cond": lambda x: lax.cond(x[0, 0] > -1, tap, lambda x: x, x),
        "call": lambda x: hcb.call(lambda x: x, tap(x), result_shape=x),
    }
    whole = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    with jax.set_mesh(mesh):
        inner = jax.shard_map(bodies[kind], in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names={"j"})
        outer = jax.shard_map(inner, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
        np.testing.assert_array_equal(jax.jit(outer)(whole), whole + 1)
    hcb.barrier_wait()
    quarters = [part + 1 for half in np.split(whole, 2) for part in np.split(half, 2, 1)]
    for device, quarter in zip(jax.devices(), quarters, strict=True):
        (value,) = rec.on(device)
        np.testing.assert_array_equal(value, quarter)


def test_groups_may_take_different_branches(rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))

    def body(x: Any) -> Any:
        return lax.cond(
            lax.axis_index("i") == 0,
            lambda x: hcb.id_tap(rec, x, branch=0),
            lambda x: hcb.id_tap(rec, -x, branch=1),
            x,
        )

    f = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
    jax.jit(f)(jnp.arange(16.0).reshape(4, 4))
    hcb.barrier_wait()
    assert sorted((k["branch"], float(v.sum())) for k, v in zip(rec.kwargs, rec.values, strict=True)) == [
        (0, 28.0),
        (1, -92.0),
    ]


def test_grad_through_a_partially_manual_region(rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
    f = jax.shard_map(
        lambda x: hcb.id_tap(rec, x) ** 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}
    )
    grads = jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.arange(4.0))
    hcb.barrier_wait()
    np.testing.assert_array_equal(grads, [0.0, 2.0, 4.0, 6.0])
    assert sorted((len(t), v.tolist()) for t, v in zip(rec.transforms, rec.values, strict=True)) == [
        (0, [0.0, 1.0]),
        (0, [2.0, 3.0]),
        (2, [0.0, 2.0]),
        (2, [4.0, 6.0]),
    ]
