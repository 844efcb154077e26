"""Several devices: all read the same value at the same point of a launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback.lifecycle import receivers

SPEC = PartitionSpec("i")


@contextmanager
def changing(name: str) -> Iterator[None]:
    """Sets a knob again and again from another thread."""
    ended = threading.Event()

    def change() -> None:
        value = 0
        while not ended.wait(1e-4):
            value += 1
            hcb.knobs[name] = value

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def mesh() -> Mesh:
    """The four devices along one axis."""
    return Mesh(np.array(jax.devices()), ("i",))


STEPS = 20_000 if receivers.use_native("cpu") else 300


@pytest.mark.parametrize("read", ["always", pytest.param("call", marks=pytest.mark.native_only)])
def test_devices_of_a_shard_map_read_the_same(name: str, read: Any) -> None:
    def body(x: Any) -> Any:
        _, seen = jax.lax.scan(lambda c, _: (c, hcb.knob(name, 0.0, read=read)), 0.0, None, length=STEPS)
        return seen[None] + 0 * x[:, None]

    f = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=SPEC, out_specs=SPEC))
    f(jnp.zeros(4)).block_until_ready()
    values = set()
    with changing(name):
        while len(values) < 3:
            seen = np.asarray(f(jnp.zeros(4)))
            np.testing.assert_array_equal(seen, np.broadcast_to(seen[0], seen.shape))
            assert (np.diff(seen[0]) >= 0).all()
            if read == "call":
                assert len(np.unique(seen)) == 1
            values |= set(seen[0].tolist())


def test_devices_that_the_compiler_partitions_for_read_the_same(name: str) -> None:
    @jax.jit
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            value = hcb.knob(name, 0.0)
            return jnp.maximum(c, value), c + value

        _, seen = jax.lax.scan(step, x * 0, None, length=STEPS)
        return seen

    x = jax.device_put(jnp.zeros(8), NamedSharding(mesh(), SPEC))
    f(x).block_until_ready()
    values = set()
    with changing(name):
        while len(values) < 3:
            seen = np.asarray(f(x))
            np.testing.assert_array_equal(seen, np.broadcast_to(seen[:, :1], seen.shape))
            values |= set(seen[:, 0].tolist())


def test_a_knob_may_shape_sharded_arrays(name: str) -> None:
    f = jax.jit(lambda x: x * hcb.knob(name, np.arange(8.0, dtype=np.float32)))
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh(), SPEC))
    np.testing.assert_array_equal(f(x), np.arange(8.0))
    hcb.knobs[name] = np.arange(8.0) * 2
    np.testing.assert_array_equal(f(x), np.arange(8.0) * 2)


def test_a_device_that_leaves_reads_out_holds_up_no_other(name: str) -> None:
    def body(x: Any) -> Any:
        index = jax.lax.axis_index("i")

        def step(c: Any, _: Any) -> Any:
            return jax.lax.cond(index > 0, lambda c: c + 0 * hcb.knob(name, 0.0), lambda c: c, c), None

        return jax.lax.scan(step, x, None, length=500)[0]

    f = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=SPEC, out_specs=SPEC, check_vma=False))
    hcb.knob(name, 0.0)
    with changing(name):
        for _ in range(20):
            np.testing.assert_array_equal(f(jnp.arange(4.0)), np.arange(4.0))


def test_a_pmap_reads(name: str) -> None:
    f = jax.pmap(lambda x: x * hcb.knob(name, 2.0))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), np.arange(4.0) * 2)


@pytest.mark.native_only
def test_a_program_that_is_lowered_leaves_running_launches_their_value(name: str) -> None:
    def scan(length: int) -> Any:
        def step(_: Any, __: Any) -> Any:
            value = hcb.knob(name, 1.0, read="call")
            return value, None

        def lowest(state: Any, x: Any) -> Any:
            value, _ = step(None, x)
            return (jnp.minimum(state[0], value), jnp.maximum(state[1], value)), None

        return jax.jit(lambda: jax.lax.scan(lowest, (jnp.float32(9), jnp.float32(0)), None, length=length)[0])

    running = scan(3_000_000)()
    hcb.knobs[name] = 2.0
    scan(3)()
    assert tuple(map(float, running)) in ((1.0, 1.0), (2.0, 2.0))


@pytest.mark.native_only
def test_a_shard_map_over_some_axes_reads_knobs(name: str) -> None:
    # JAX has no Python callbacks there. XLA of JAX 0.12 aborts the process where such a call has a token.
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"))
    x = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, PartitionSpec(("i", "j"))))

    def program(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x + hcb.knob(name, 1.0), None), x, length=3)[0]

    run = jax.jit(
        jax.shard_map(
            program, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"), axis_names={"i"}
        )
    )
    np.testing.assert_array_equal(run(x), np.full(4, 3.0))
    hcb.knobs[name] = 2.0
    np.testing.assert_array_equal(run(x), np.full(4, 6.0))
