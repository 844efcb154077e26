"""Tests of finite values and statistics: native on CPUs, by XLA elsewhere; the answers are those of numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback.api  # noqa: F401  (registers the lowering rules)
from hostcallback.lowering.device_ops import shares_of_shards
from hostcallback.primitives.device_ops import (
    merged_statistics,
    not_finite,
    reduce_merged_statistics,
    reduce_not_finite,
    reduce_share_statistics,
    reduce_statistics,
    share_statistics,
    statistics,
)

NAMES = ("mean", "std", "min", "max", "norm", "zeros", "nonfinite")
SIZES = (1, 3, 31, 1003, 9001)  # less than a vector, and more than what is measured at a time


def in_order(x: Any) -> list[Any]:
    measured = statistics(x)
    return [measured[name] for name in NAMES]


def expected(x: Any) -> list[Any]:
    with np.errstate(invalid="ignore"):
        x = np.asarray(x, np.float64)
        return [
            *(x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x)),
            *((x == 0).mean(), (~np.isfinite(x)).mean()),
        ]


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
def test_any_element_that_is_not_finite_is_found(dtype: str) -> None:
    with jax.enable_x64(True):
        test = jax.jit(lambda x, y: not_finite([x, y, x], [1, 0, 1]))
        for size in SIZES:
            largest = float(jnp.finfo(dtype).max)
            good = jnp.where(jnp.arange(size) % 2, largest, -largest).astype(dtype)
            assert test(good, good).tolist() == [False, False]
            for bad in (np.nan, np.inf, -np.inf, -np.nan):
                for place in {0, size // 2, size - 1}:
                    assert test(good.at[place].set(bad), good).tolist() == [False, True]
        if dtype.startswith("complex"):
            assert test(good.at[5].set(complex(0, np.inf)), good).tolist() == [False, True]


def test_nothing_to_test_is_finite() -> None:
    assert not_finite([], []).shape == (0,)
    assert jax.jit(lambda x: not_finite([x], [0]))(jnp.zeros((0, 3))).tolist() == [False]
    assert not_finite([jnp.float32(np.nan), jnp.float8_e5m2(1)], [0, 1]).tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_of_many_elements(dtype: str) -> None:
    with jax.enable_x64(True):
        measure = jax.jit(in_order)
        for size in SIZES:
            # Far from zero: the difference of two large sums would have no correct digit.
            x = np.random.default_rng(size).normal(1000, 0.5, size).astype(dtype)
            x[size // 2] = 0
            got = measure(x)
            assert {value.dtype for value in got} == {np.dtype(np.float32)}
            np.testing.assert_allclose(got, expected(x), rtol=1e-5)
            for bad in (np.nan, np.inf, -np.inf):
                x[-1] = bad
                np.testing.assert_allclose(measure(x), expected(x), rtol=1e-5)
    both = np.array([np.inf, 1, -np.inf], dtype)
    np.testing.assert_allclose(in_order(jnp.asarray(both)), expected(both), rtol=1e-5)


def test_under_vmap_and_grad_and_shard_map() -> None:
    x = jnp.arange(24.0).reshape(4, 6).at[2, 3].set(jnp.nan)
    lanes = jax.jit(jax.vmap(lambda x: (not_finite([x, x * 0 + 1], [0, 1]), statistics(x)["max"]), in_axes=1))
    failed, largest = lanes(x)
    assert failed[:, 0].tolist() == [False, False, False, True, False, False]
    assert failed[:, 1].tolist() == failed[:, 0].tolist()
    np.testing.assert_array_equal(largest, np.max(np.asarray(x), axis=0))

    gradient = jax.grad(lambda x: x**2 + statistics(x * jnp.ones(3))["norm"] + not_finite([x], [0])[0])(3.0)
    assert gradient == 6

    mesh = Mesh(np.array(jax.devices()[:2]), "d")

    @jax.jit
    def each(x: Any) -> Any:
        def inside(x: Any) -> Any:
            return not_finite([x], [0]), statistics(x)["min"][None]

        return jax.shard_map(inside, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    failed, least = each(x)
    assert failed.tolist() == [False, True]
    np.testing.assert_array_equal(least, [0, np.nan])


def test_what_the_compiler_divides_is_reduced_where_it_is() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    x = jax.device_put(jnp.arange(8.0).at[7].set(jnp.inf), NamedSharding(mesh, P("d")))
    both = jax.jit(lambda x: (not_finite([x], [0]), statistics(x)["norm"]))
    assert "custom_call @hostcallback" not in both.lower(x).as_text()
    assert [both(x)[0].tolist(), float(both(x)[1])] == [[True], np.inf]


def mesh_of_four() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


def of_shares(x: Any) -> list[Any]:
    [measured] = merged_statistics([share_statistics(x, 4)])
    return [measured[name] for name in NAMES]


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))])
@pytest.mark.parametrize("bad", [0, np.nan, np.inf, -np.inf])
def test_devices_measure_their_shares_of_an_array(spec: Any, bad: float) -> None:
    x = np.random.default_rng(0).normal(1000, 0.5, (16, 8, 5)).astype(np.float32)
    x[3, 2, 1], x[15, 7, 4] = 0, bad
    placed = jax.device_put(x, NamedSharding(mesh_of_four(), spec))
    np.testing.assert_allclose(jax.jit(of_shares)(placed), expected(x), rtol=1e-5)
    # A shard in which another axis is the one in pieces, and which is padded where its length is not divided evenly.
    part = jax.jit(lambda x: of_shares(x.swapaxes(0, 1)[1:, :15, 1:]))
    np.testing.assert_allclose(part(placed), expected(x[:15, 1:, 1:]), rtol=1e-5)


def test_shares_of_doubles_and_scalars_and_of_a_program_on_one_device() -> None:
    with jax.enable_x64(True):
        x = jax.device_put(np.arange(16.0) * 1e200, NamedSharding(mesh_of_four(), P("a")))
        tiny = jax.jit(lambda x: of_shares(x * 1e-200))
        np.testing.assert_allclose(tiny(x), expected(np.arange(16.0)), rtol=1e-5)
    one = jax.device_put(jnp.float32(3), NamedSharding(mesh_of_four(), P()))
    np.testing.assert_allclose(jax.jit(of_shares)(one), expected(3.0), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(of_shares)(jnp.arange(7.0)), expected(np.arange(7.0)), rtol=1e-5)


def test_each_element_is_of_one_share() -> None:
    # 7 x 3 elements over 4 x 1 devices, of which two have the same: shards of 2 x 3, the last one half padding.
    starts = [(2 * (i // 2), 0) for i in range(8)]
    table = shares_of_shards((7, 3), (2, 3), starts)
    assert table[:, :2].tolist() == [[0, 3], [3, 6]] * 3 + [[0, 1], [1, 3]]
    assert table[:, 2:].tolist() == [[2, 3]] * 6 + [[1, 3]] * 2


@pytest.mark.native_only
def test_the_devices_exchange_all_statistics_of_a_program_at_once() -> None:
    x = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh_of_four(), P("a", "b")))

    @jax.jit
    def program(x: Any) -> Any:
        def step(carry: Any, factor: Any) -> Any:
            return carry * factor, share_statistics(carry * factor, 4)

        _, rows = jax.lax.scan(step, x, jnp.array([1.0, -2.0, 3.0]))
        return merged_statistics([share_statistics(x, 4), rows, share_statistics(-x, 4)])

    text = program.lower(x).compile().as_text()
    assert (text.count(" all-gather("), text.count(" all-reduce(")) == (1, 0)
    first, looped, _ = program(x)
    host = np.asarray(x)
    factors = np.array([1.0, -2.0, -6.0])
    np.testing.assert_allclose(first["std"], host.std(), rtol=1e-5)
    np.testing.assert_allclose(looped["mean"], host.mean() * factors, rtol=1e-5)
    np.testing.assert_allclose(looped["max"], [(host * f).max() for f in factors], rtol=1e-5)


def test_shares_where_gspmd_divides_the_program() -> None:
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", None)
    if shardy is None:
        return  # this JAX has Shardy only
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        x = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh_of_four(), P("a", "b")))
        np.testing.assert_allclose(jax.jit(of_shares)(x), expected(np.arange(64.0)), rtol=1e-5)
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)


@pytest.mark.slow
@pytest.mark.native_only
def test_the_merging_handler_gives_what_xla_gives() -> None:
    x = jax.device_put(jnp.sin(jnp.arange(96.0)).reshape(8, 12), NamedSharding(mesh_of_four(), P("a")))
    [rows] = jax.jit(lambda x: [share_statistics(x, 4)])(x)
    assert rows[:, 7].tolist() == [24.0] * 4
    merged = reduce_merged_statistics(rows[:, None], shapes=((),))
    np.testing.assert_allclose(jax.jit(of_shares)(x), merged, rtol=1e-5, atol=1e-7)
    whole = reduce_share_statistics(x, devices=4)[0]
    np.testing.assert_allclose(
        reduce_merged_statistics(whole[:, None], shapes=((),)), merged, rtol=1e-5, atol=1e-7
    )


def test_a_program_for_another_process_needs_no_handler() -> None:
    from jax import export

    exported = export.export(jax.jit(lambda x: statistics(x)["mean"]), platforms=["cpu", "cuda"])(jnp.ones(3))
    assert "hostcallback_statistics" not in exported.mlir_module()
    assert exported.call(jnp.arange(3.0)) == 1
    on_gpu = jax.jit(lambda x: not_finite([x], [0])).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",))
    assert "custom_call @hostcallback" not in on_gpu.as_text()


@pytest.mark.native_only
def test_the_native_handlers_give_what_xla_gives() -> None:
    x = jnp.sin(jnp.arange(300.0)).reshape(3, 100)
    program = jax.jit(lambda x: (in_order(x), not_finite([x, 1 / x], [0, 1])))
    text = program.lower(x).as_text()
    assert text.count("@hostcallback_statistics") == text.count("@hostcallback_not_finite") == 1
    measured, failed = program(x)
    np.testing.assert_allclose(measured, jax.jit(reduce_statistics)(x), rtol=1e-5, atol=1e-7)
    assert failed.tolist() == reduce_not_finite(x, 1 / x, groups=(0, 1))[0].tolist() == [False, True]
