"""Typed PRNG keys and references arrive with their types."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.primitives import effects
from recorder import Recorder
from transforming import JVP, TRANSPOSE, Jit, batch

# ---- Typed PRNG keys -------------------------------------------------------------------------------------------------

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


def assert_key(got: Any, expected: Any) -> None:
    assert jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_arrives_as_a_key_and_is_returned_as_one(jit: Jit, impl: str, rec: Recorder) -> None:
    key = jax.random.key(7, impl=impl)

    def f(key: Any) -> Any:
        return jax.random.uniform(hcb.id_tap(rec, {"key": key})["key"])

    drawn = jit(f)(key)
    jit(f)(key)
    hcb.barrier_wait()
    for value in rec.values:
        assert_key(value["key"], key)
        assert float(jax.random.uniform(value["key"])) == float(drawn)  # the key is still unused
    assert len(rec) == 2


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_arrays_of_keys_arrive_in_their_shape(jit: Jit, shape: tuple[int, ...], rec: Recorder) -> None:
    keys = jax.random.split(jax.random.key(0), shape)
    out = jit(lambda keys: hcb.id_tap(rec, keys))(keys)
    hcb.barrier_wait()
    assert_key(out, keys)
    assert_key(rec.values[0], keys)


@pytest.mark.skipif(
    not effects.installed,
    reason="without fast dispatch, JAX moves a token of its effects to the device for the call",
)
@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_keys_and_jax_arrays_arrive_though_transfers_are_disallowed(guard: str, rec: Recorder) -> None:
    key, x, stream = jax.random.key(7), jnp.ones(2), io.StringIO()

    def f(key: Any, x: Any) -> Any:
        hcb.id_tap(rec, key)
        hcb.print("{!r}", x, output_stream=stream)  # of a JAX array
        return x

    program = jax.jit(f).lower(key, x).compile()
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", guard)  # for all threads
    try:
        jax.block_until_ready(program(key, x))
        hcb.barrier_wait()
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert_key(rec.values[0], key)
    assert stream.getvalue() == f"{x!r}\n"


def test_a_key_of_an_implementation_of_ones_own_arrives(rec: Recorder) -> None:
    threefry = jax.extend.random.threefry_prng_impl
    impl = jax.extend.random.define_prng_impl(
        key_shape=threefry.key_shape,
        seed=threefry.seed,
        split=threefry.split,
        random_bits=threefry.random_bits,
        fold_in=threefry.fold_in,
        name="of one's own",
        tag="own",
    )
    key = jax.random.key(3, impl=impl)
    hcb.jit(lambda key: hcb.id_tap(rec, key))(key)
    hcb.barrier_wait()
    assert_key(rec.values[0], key)


def test_keys_under_vmap_are_batched_along_their_own_dimensions(jit: Jit, rec: Recorder) -> None:
    keys = jax.random.split(jax.random.key(0), (2, 3))

    def f(keys: Any, x: Any, other: Any) -> Any:
        out = hcb.id_tap(rec, (keys, x, other))
        assert out[0].shape == (2,)
        return jax.random.key_data(out[0])

    out = jit(jax.vmap(f, in_axes=(1, 0, None)))(keys, jnp.arange(3.0), jax.random.key(1))
    hcb.barrier_wait()
    np.testing.assert_array_equal(out, jax.random.key_data(keys).swapaxes(0, 1))
    ((got, _, other),) = rec.values
    assert_key(got, keys)
    assert_key(other, jax.random.key(1))
    assert rec.transforms == [(batch(1, 0, None),)]


def test_keys_are_carried_through_a_scan(jit: Jit, rec: Recorder) -> None:
    def step(key: Any, _: Any) -> Any:
        key, use = jax.random.split(hcb.id_tap(rec, key))
        return key, jax.random.uniform(use)

    expected = [jax.random.key(5)]
    for _ in range(3):
        expected.append(jax.random.split(expected[-1])[0])
    last, _ = jit(lambda key: lax.scan(step, key, None, length=3))(expected[0])
    hcb.barrier_wait()
    assert len(rec) == 3
    for got, key in zip([*rec.values, last], expected, strict=True):
        assert_key(got, key)


def test_keys_have_float0_tangents_and_cotangents(jit: Jit, rec: Recorder) -> None:
    keys = jax.random.split(jax.random.key(0), 3)

    def f(x: Any, keys: Any) -> Any:
        x, keys = hcb.id_tap(rec, (x, keys))
        return (x**2 * jax.vmap(jax.random.uniform)(keys)).sum()

    jit(jax.grad(f))(2.0, keys)
    jit(lambda x: jax.jvp(f, (x, keys), (x, np.zeros(3, jax.dtypes.float0))))(2.0)
    jit(jax.vmap(jax.grad(f), in_axes=(0, None)))(jnp.ones(2), keys)
    hcb.barrier_wait()
    assert rec.transforms == [
        (), (JVP, TRANSPOSE), (), (JVP,), (batch(0, None),), (JVP, TRANSPOSE, batch(0, None)),
    ]  # fmt: skip
    for (_, primal), (_, derivative) in zip(rec.values[0::2], rec.values[1::2], strict=True):
        assert_key(primal, keys)
        assert (derivative.dtype, derivative.shape) == (jax.dtypes.float0, (3,))


def test_a_tap_function_may_draw_from_a_key_whatever_device_it_came_from() -> None:
    drawn: list[Any] = []

    def draw(key: Any, device: Any) -> None:
        # With an array of another device: a key that was committed to one could not be used.
        ones = jax.device_put(jnp.ones(2), jax.devices()[2])
        drawn.append((device, jax.random.uniform(key, 2) + ones))

    f = hcb.jit(lambda key: hcb.id_tap(draw, key))
    keys = [jax.device_put(jax.random.key(i), device) for i, device in enumerate(jax.devices())]
    for key in keys:
        f(key)
    hcb.barrier_wait()
    assert {device for device, _ in drawn} == set(jax.devices())
    for device, value in drawn:
        np.testing.assert_allclose(value, jax.random.uniform(jax.random.key(device.id), 2) + 1)


def test_keys_are_made_on_the_cpu_whatever_the_default_device() -> None:
    devices: list[Any] = []
    hcb.id_tap(lambda key: devices.append(key.devices()), jax.random.key(0))
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    jax.config.update("jax_default_device", jax.devices()[3])
    try:
        hcb.id_tap(lambda key: devices.append(key.devices()), jax.random.key(0))
        hcb.barrier_wait()
    finally:
        jax.config.update("jax_default_device", default)
    assert devices == [{jax.devices("cpu")[0]}] * 2


def test_a_key_prints_as_jax_prints_it(jit: Jit) -> None:
    out = io.StringIO()
    jit(lambda key: hcb.id_print(key, output_stream=out, what="key"))(jax.random.key(1))
    hcb.barrier_wait()
    assert out.getvalue() == f"what: key\n{jax.random.key(1)}\n"


# ---- References ------------------------------------------------------------------------------------------------------


def test_a_reference_is_tapped_by_the_value_it_has_then(jit: Jit, rec: Recorder) -> None:
    def f(ref: Any) -> Any:
        out = hcb.id_tap(rec, {"ref": ref})
        assert out["ref"] is ref
        ref[...] += 1
        hcb.id_tap(rec, ref)
        return ref[...]

    argument, closed_over = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.ones(2))
    np.testing.assert_array_equal(jit(f)(argument), [1, 1])
    np.testing.assert_array_equal(jit(lambda: f(closed_over))(), [2, 2])
    np.testing.assert_array_equal(jit(f)(argument), [2, 2])
    hcb.barrier_wait()
    np.testing.assert_array_equal([v["ref"] for v in rec.values[0::2]], [[0, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(rec.values[1::2], [[1, 1], [2, 2], [2, 2]])
    np.testing.assert_array_equal(argument[...], [2, 2])


def test_a_reference_made_inside_is_tapped_in_a_loop(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)

        def body(i: Any, carry: Any) -> Any:
            hcb.id_tap(rec, ref)
            ref[...] *= 2
            return carry

        lax.fori_loop(0, 3, body, None)
        hcb.id_tap(rec, ref)
        return ref[...]

    assert float(jit(f)(1.0)) == 8.0
    hcb.barrier_wait()
    assert rec.floats() == [1.0, 2.0, 4.0, 8.0]


def test_references_under_transformations(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] *= 3
        hcb.id_tap(rec, ref)
        return ref[...].sum()

    jit(jax.vmap(f))(jnp.ones((2, 3)))
    jit(lambda x: jax.jvp(f, (x,), (x,)))(jnp.ones(3))
    np.testing.assert_array_equal(jit(jax.grad(f))(jnp.ones(3)), [3, 3, 3])
    hcb.barrier_wait()
    # The reference is returned: no gradient flows back through the value that was read for the tap.
    assert rec.transforms == [(batch(0),), (), (JVP,), ()]
    np.testing.assert_array_equal(rec.values[0], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(rec.values[1:4], np.full((3, 3), 3.0))


def test_a_reference_to_keys_is_tapped_as_keys(jit: Jit, rec: Recorder) -> None:
    ref = jax.new_ref(jax.random.key(9))
    jit(lambda: hcb.id_tap(rec, ref, result=0))()
    hcb.barrier_wait()
    assert_key(rec.values[0], jax.random.key(9))


def test_keys_and_references_on_several_devices(rec: Recorder) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    keys = jax.random.split(jax.random.key(0), 8)

    # Partitioned by the compiler, and assembled. (References of several devices are not arguments here: JAX 0.8.0 waits
    # for such a program with the interpreter lock held, so it hangs with Python callbacks of any kind in it.)
    jax.jit(lambda keys: hcb.id_tap(rec, keys))(jax.device_put(keys, sharding))
    x = jax.device_put(jnp.arange(8.0), sharding)
    jax.jit(lambda x: hcb.id_tap(rec, jax.new_ref(x), result=0))(x)
    hcb.barrier_wait()
    assert_key(rec.values[0], keys)
    np.testing.assert_array_equal(rec.values[1], np.arange(8.0))

    rec.__init__()  # type: ignore[misc]
    jax.jit(jax.shard_map(lambda k: hcb.id_tap(rec, k), mesh=mesh, in_specs=spec, out_specs=spec))(keys)
    jax.pmap(lambda k: hcb.id_tap(rec, k))(keys.reshape(4, 2))
    hcb.barrier_wait()
    for index, device in enumerate(jax.devices()):
        by_shard_map, by_pmap = rec.on(device)
        assert_key(by_shard_map, keys[2 * index : 2 * index + 2])
        assert_key(by_pmap, keys[2 * index : 2 * index + 2])
