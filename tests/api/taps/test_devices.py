"""Taps on several devices name their device and carry their part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder


def test_a_program_on_another_device_taps_there(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x) + 1)
    for device in reversed(jax.devices()):
        f(jax.device_put(jnp.float32(device.id), device))
    hcb.barrier_wait()
    assert {d.id: float(v) for d, v in zip(rec.devices, rec.values, strict=True)} == {i: i for i in range(4)}


def test_an_eager_tap_is_on_its_arguments_device(rec: Recorder) -> None:
    for device in jax.devices():
        hcb.id_tap(rec, jax.device_put(1.0, device))
    hcb.barrier_wait()
    assert sorted(d.id for d in rec.devices) == [0, 1, 2, 3]


def test_shard_map_taps_every_devices_shard(rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
    spec = PartitionSpec("i", "j")

    def per_device(x: Any) -> Any:
        total = lax.psum(x, ("i", "j"))
        return hcb.id_tap(rec, x, result=x + total)

    jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))(
        jnp.arange(16.0).reshape(4, 4)
    )
    hcb.barrier_wait()
    whole = np.arange(16.0).reshape(4, 4)
    expected = {0: whole[:2, :2], 1: whole[:2, 2:], 2: whole[2:, :2], 3: whole[2:, 2:]}
    assert len(rec) == 4
    for device, value in zip(rec.devices, rec.values, strict=True):
        np.testing.assert_array_equal(value, expected[device.id])


def test_grad_through_shard_map(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")

    def loss(x: Any) -> Any:
        per_device = jax.shard_map(
            lambda x: hcb.id_tap(rec, x) ** 2, mesh=mesh, in_specs=spec, out_specs=spec
        )
        return per_device(x).sum()

    grads = jax.jit(jax.grad(loss))(jnp.arange(4.0))
    hcb.barrier_wait()
    np.testing.assert_array_equal(grads, [0.0, 2.0, 4.0, 6.0])
    assert len(rec) == 8
    for device in jax.devices():
        assert [float(v[0]) for v in rec.on(device)] == [device.id, 2.0 * device.id]


def test_pmap_taps_every_device_also_in_a_scan_and_with_axes(rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return hcb.id_tap(rec, c + lax.axis_index("d")), None

        return lax.scan(body, x + y, None, length=3)[0]

    out = jax.pmap(f, axis_name="d", in_axes=(0, None))(jnp.zeros(4), 1.0)
    hcb.barrier_wait()
    np.testing.assert_array_equal(out, [1.0, 4.0, 7.0, 10.0])
    for device in jax.devices():
        assert [float(v) for v in rec.on(device)] == [1.0 + device.id * k for k in (1, 2, 3)]


def test_grad_of_pmap(rec: Recorder) -> None:
    jax.grad(lambda x: jax.pmap(lambda x: hcb.id_tap(rec, x) ** 2)(x).sum())(jnp.arange(4.0))
    hcb.barrier_wait()
    assert sorted((d.id, float(v)) for d, v in zip(rec.devices, rec.values, strict=True)) == sorted(
        [(i, float(i)) for i in range(4)] + [(i, 2.0 * i) for i in range(4)]
    )


def test_axis_index_and_collectives_under_vmap_with_an_axis_name(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, lax.psum(x, "b") + lax.axis_index("b"))

    jax.jit(jax.vmap(f, axis_name="b"))(jnp.arange(3.0))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0], [3.0, 4.0, 5.0])


def test_a_multi_device_program_may_tap_inside_its_shard_map(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, spec))

    def f(x: Any) -> Any:
        tapped = jax.shard_map(lambda x: hcb.id_tap(rec, x), mesh=mesh, in_specs=spec, out_specs=spec)
        return (tapped(x * 2) + 1).sum()

    assert float(jax.jit(f)(x)) == 16.0
    hcb.barrier_wait()
    assert sorted((d.id, float(v[0])) for d, v in zip(rec.devices, rec.values, strict=True)) == [
        (0, 0.0),
        (1, 2.0),
        (2, 4.0),
        (3, 6.0),
    ]
