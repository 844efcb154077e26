"""Tests of finite values and statistics: native on CPUs, by XLA elsewhere; the answers are those of numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback.api  # noqa: F401  (registers the lowering rules)
from hostcallback.primitives.reductions import not_finite, reduce_not_finite, reduce_statistics, statistics

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
