"""`pmap` and fully manual `shard_map`, on two and four devices: each device's taps in its program order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, PRIMAL, Jit

AXIS = "i"
STEPS = 1500  # above a thousand
SITES = 40
SIDE = 48  # XLA:CPU runs programs of few thunks and small buffers sequentially, which would hide disorder

# Each makes, of a function of one device's array and a number of devices, a function of the stacked arrays.
Layout = Callable[[Callable[[Any], Any], int], Callable[[Any], Any]]


def in_pmap(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    return jax.pmap(f, axis_name=AXIS)


def in_shard_map(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    spec = PartitionSpec(AXIS)
    mesh = Mesh(jax.devices()[:count], (AXIS,))
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def in_shard_map_over_two_axes(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    spec = PartitionSpec(("a", AXIS))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(count // 2, 2), ("a", AXIS))
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


LAYOUTS = [in_pmap, in_shard_map, in_shard_map_over_two_axes]

pytestmark = [
    pytest.mark.parametrize("layout", LAYOUTS),
    pytest.mark.parametrize("count", [2, 4]),
]


def expect_on_every_device(rec: Recorder, count: int, expected: Callable[[int], list[Any]]) -> None:
    """Waits, and compares the messages of each device with `expected(number of the device)`."""
    hcb.barrier_wait()
    assert {device.id for device in rec.devices} == set(range(count))
    for device in jax.devices()[:count]:
        assert [int(value) for value in rec.on(device)] == expected(device.id)


def test_a_scan_of_many_steps(jit: Jit, count: int, layout: Layout, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, c) + 1, None), x, None, length=STEPS)[0]

    start = 10_000 * jnp.arange(count)
    out = jit(layout(f, count))(start)
    expect_on_every_device(rec, count, lambda i: list(range(10_000 * i, 10_000 * i + STEPS)))
    np.testing.assert_array_equal(out, start + STEPS)


def test_a_scan_of_many_steps_with_collectives(jit: Jit, count: int, layout: Layout, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            c = hcb.id_tap(rec, c + lax.psum(jnp.int32(1), AXIS))
            hcb.id_tap(rec, lax.pmax(i, AXIS))
            return c, None

        return lax.scan(step, x, jnp.arange(STEPS))[0]

    jit(layout(f, count))(jnp.zeros(count, jnp.int32))
    added = 2 if layout is in_shard_map_over_two_axes else count
    both = [[added * (i + 1), i] for i in range(STEPS)]
    expect_on_every_device(rec, count, lambda _: [value for pair in both for value in pair])


@pytest.mark.slow_variants
def test_grad_of_a_scan_of_many_steps(jit: Jit, count: int, layout: Layout, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, i: (c * 1.0, hcb.id_tap(rec, c * i)), x, jnp.arange(float(STEPS)))[1].sum()

    jit(jax.grad(lambda x: layout(f, count)(x).sum()))(jnp.arange(1.0, count + 1))
    hcb.barrier_wait()
    for i, device in enumerate(jax.devices()[:count]):
        messages = list(zip(rec.transforms, rec.values, rec.devices, strict=True))
        own = [(transforms, float(value)) for transforms, value, d in messages if d == device]
        assert own[:STEPS] == [(PRIMAL, float((i + 1) * k)) for k in range(STEPS)]
        assert own[STEPS:] == [(COTANGENT, 1.0)] * STEPS


@pytest.mark.slow_variants
def test_independent_taps_keep_program_order(count: int, layout: Layout, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        branches = []
        for i in range(SITES):
            y = x @ x if i % 3 else x  # unequal work, so that running ahead would show
            branches.append(hcb.id_tap(rec, (y + i)[0, 0], site=i))
        return sum(branches)

    g = jax.jit(layout(f, count))
    for _ in range(3):
        g(jnp.ones((count, SIDE, SIDE)))
    hcb.barrier_wait()
    for device in jax.devices()[:count]:
        sites = [k["site"] for k, d in zip(rec.kwargs, rec.devices, strict=True) if d == device]
        assert sites == list(range(SITES)) * 3
