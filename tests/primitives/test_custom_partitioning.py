"""Taps in functions with `jax.experimental.custom_partitioning`: whole on one device, each device's part on several."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import PRIMAL, Jit, delivered

X = jnp.arange(8.0)
PAIRS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
SPEC = PartitionSpec("i")

Function = Callable[[Any], Any]


def partitioned(function: Function, body: Function | None = None) -> Function:
    """A function whose rule says that each device runs `body`, or the function itself, on its shard."""
    result: Any = custom_partitioning(function)

    def rule(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        return mesh, body or function, arg_shapes[0].sharding, (arg_shapes[0].sharding,)

    result.def_partition(
        partition=rule,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i -> i",
    )
    return lambda x: result(x)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("i",))


def sharded() -> Any:
    return jax.device_put(X, NamedSharding(mesh(), SPEC))


def double(rec: Recorder, *, ordered: bool = True) -> Function:
    return lambda x: hcb.id_tap(rec, x, ordered=ordered) * 2


@pytest.mark.parametrize("ordered", [True, False])
def test_on_one_device_the_function_taps(jit: Jit, ordered: bool, rec: Recorder) -> None:
    f = jit(partitioned(double(rec, ordered=ordered)))
    assert f(X).tolist() == (2 * X).tolist()
    assert delivered(rec) == [(PRIMAL, X.tolist())]


@pytest.mark.native_only
@pytest.mark.parametrize("ordered", [True, False])
def test_on_several_each_device_taps_its_part(ordered: bool, rec: Recorder) -> None:
    f = jax.jit(partitioned(double(rec, ordered=ordered)))
    assert f(sharded()).tolist() == (2 * X).tolist()
    for device, pair in zip(jax.devices(), PAIRS, strict=True):
        assert delivered(rec, device) == [(PRIMAL, pair)]


@pytest.mark.native_only
def test_a_device_delivers_its_rules_taps_in_program_order(rec: Recorder) -> None:
    def body(x: Any) -> Any:
        x = lax.fori_loop(0, 3, lambda i, x: hcb.id_tap(rec, x) + 1, x)
        return hcb.id_tap(rec, lax.psum(x, "i"))

    f = jax.jit(
        lambda x: lax.scan(lambda x, _: (partitioned(double(rec), body)(x), None), x, None, length=2)[0]
    )
    f(sharded())
    total = [24.0, 28.0]
    assert [value for _, value in delivered(rec, jax.devices()[1])] == [
        *([2.0 + i, 3.0 + i] for i in range(3)), total,
        *([24.0 + i, 28.0 + i] for i in range(3)), [4 * 27.0, 4 * 31.0],
    ]  # fmt: skip


@pytest.mark.native_only
def test_a_body_may_tap_where_the_function_does_not(rec: Recorder) -> None:
    jax.jit(partitioned(lambda x: x * 2, double(rec)))(sharded()).block_until_ready()
    hcb.barrier_wait()
    assert sorted(value.tolist() for value in rec.values) == PAIRS


@pytest.mark.native_only
def test_an_unused_result_does_not_lose_the_taps(rec: Recorder) -> None:
    def unused(x: Any) -> Any:
        partitioned(double(rec))(x)
        return x

    jax.jit(unused)(sharded())
    hcb.barrier_wait()
    assert sorted(value.tolist() for value in rec.values) == PAIRS


@pytest.mark.slow
@pytest.mark.native_only
def test_consumers_of_bodies_live_as_long_as_their_program(rec: Recorder) -> None:
    f = jax.jit(partitioned(double(rec)))
    for _ in range(3):
        f(sharded())
        hcb.barrier_wait()
        gc.collect()
    assert [value for _, value in delivered(rec, jax.devices()[0])] == [[0, 1]] * 3


def test_each_device_of_a_shard_map_taps_its_part(rec: Recorder) -> None:
    f = partitioned(double(rec))
    jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=SPEC, out_specs=SPEC, check_vma=False))(X)
    for device, pair in zip(jax.devices(), PAIRS, strict=True):
        assert delivered(rec, device) == [(PRIMAL, pair)]


def test_taps_unsupported_in_a_partitioned_body_are_refused_with_the_line_and_the_cure(
    rec: Recorder, transport: str
) -> None:
    cure = r"test_custom_partitioning\.py:\d+ .*custom_partitioning.*jax\.shard_map"

    def calling(x: Any) -> Any:
        return hcb.call(np.sort, x, result_shape=x)

    with pytest.raises(NotImplementedError, match="the call of sort at .*" + cure):
        jax.jit(partitioned(calling))(sharded())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the call of sort at .*" + cure):
        jax.jit(partitioned(lambda x: x, calling))(sharded())
    if transport == "callback":
        with pytest.raises(NotImplementedError, match="the tap Recorder at .*" + cure):
            jax.jit(partitioned(double(rec)))(sharded())
    assert jax.jit(partitioned(calling))(X).tolist() == X.tolist()


def test_a_program_without_taps_is_as_it_was() -> None:
    text = jax.jit(partitioned(lambda x: x * 2)).lower(sharded()).as_text()
    assert text.count("CustomSPMDPartitioning") == 1
    assert "has_side_effect = true" not in text
    assert jax.make_jaxpr(partitioned(lambda x: x * 2))(X).effects == set()
