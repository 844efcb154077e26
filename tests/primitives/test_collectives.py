"""Collectives around and inside tapped code: under `vmap` with an axis name, in `pmap` and in `shard_map`."""

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
from transforming import COTANGENT, JVP, PRIMAL, TANGENT, TRANSPOSE, Jit, batch, delivered, plain

AXIS = "i"
SHARDED = PartitionSpec(AXIS)
Collective = Callable[[Any], Any]

# The values that each element of [1, 2] gets.
COLLECTIVES = [
    pytest.param(lambda x: lax.psum(x, AXIS), [3, 3], id="psum"),
    pytest.param(lambda x: lax.pmax(x, AXIS), [2, 2], id="pmax"),
    pytest.param(lambda x: lax.all_gather(x, AXIS), [[1, 2], [1, 2]], id="all_gather"),
    pytest.param(lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), [2, 1], id="ppermute"),
    pytest.param(lambda x: x + lax.axis_index(AXIS), [1, 3], id="axis_index"),
]


def in_pmap(f: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    return jax.pmap(f, axis_name=AXIS, **options)


def in_shard_map(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f` on each device's element, as `pmap` runs it."""
    per_device = jax.shard_map(
        lambda x: jax.tree.map(lambda v: v[None], f(x[0])),
        mesh=Mesh(jax.devices()[:2], (AXIS,)),
        in_specs=SHARDED,
        out_specs=SHARDED,
        check_vma=False,
    )
    return per_device


MAPS = [pytest.param(in_pmap, id="pmap"), pytest.param(in_shard_map, id="shard_map")]


def each(rec: Recorder, count: int = 2) -> list[list[tuple[Any, Any]]]:
    """Messages of each of the first devices."""
    return [delivered(rec, device) for device in jax.devices()[:count]]


@pytest.mark.parametrize(("collective", "expected"), COLLECTIVES)
def test_collectives_of_tapped_values_tapped_under_vmap(
    jit: Jit, collective: Collective, expected: Any, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, collective(hcb.id_tap(rec, x)))

    jit(jax.vmap(f, axis_name=AXIS))(jnp.array([1, 2]))
    before, after = delivered(rec)
    assert before == ((batch(0),), [1, 2])
    # Values that are the same for all elements have no batch.
    assert after in ([((batch(0),), expected), (PRIMAL, expected[0])])


@pytest.mark.parametrize(("collective", "expected"), COLLECTIVES)
@pytest.mark.parametrize("mapped", MAPS)
def test_collectives_of_tapped_values_tapped_on_each_device(
    jit: Jit, mapped: Any, collective: Collective, expected: Any, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, collective(hcb.id_tap(rec, x)))

    jit(mapped(f))(jnp.array([1, 2]))
    assert each(rec) == [[(PRIMAL, 1), (PRIMAL, expected[0])], [(PRIMAL, 2), (PRIMAL, expected[1])]]


def test_grad_of_a_collective_under_vmap(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return jax.vmap(lambda x: lax.psum(hcb.id_tap(rec, x * x), AXIS), axis_name=AXIS)(x).sum()

    jit(jax.grad(f))(jnp.arange(3.0))
    assert delivered(rec) == [((batch(0),), [0.0, 1.0, 4.0]), ((batch(0), JVP, TRANSPOSE), [3.0, 3.0, 3.0])]


@pytest.mark.parametrize("mapped", MAPS)
def test_grad_of_a_mapped_function(jit: Jit, mapped: Any, rec: Recorder) -> None:
    gradient = jit(jax.grad(lambda x: mapped(lambda x: hcb.id_tap(rec, x) ** 2)(x).sum()))(
        jnp.array([1.0, 3.0])
    )
    assert each(rec) == [[(PRIMAL, 1.0), (COTANGENT, 2.0)], [(PRIMAL, 3.0), (COTANGENT, 6.0)]]
    np.testing.assert_array_equal(gradient, [2.0, 6.0])


@pytest.mark.parametrize("mapped", MAPS)
def test_a_mapped_gradient_of_a_sum_over_devices(jit: Jit, mapped: Any, rec: Recorder) -> None:
    jit(mapped(jax.grad(lambda x: lax.psum(hcb.id_tap(rec, x) ** 2, AXIS))))(jnp.array([1.0, 3.0]))
    # The transpose of a psum is one: each device's cotangent counts once for each device.
    assert each(rec) == [[(PRIMAL, 1.0), (COTANGENT, 4.0)], [(PRIMAL, 3.0), (COTANGENT, 12.0)]]


@pytest.mark.parametrize("mapped", MAPS)
def test_jvp_and_hessian_of_a_mapped_function(jit: Jit, mapped: Any, rec: Recorder) -> None:
    f = mapped(lambda x: hcb.id_tap(rec, x) ** 3)
    x = jnp.array([1.0, 2.0])
    jit(lambda x: jax.jvp(f, (x,), (x,)))(x)
    assert each(rec) == [[(PRIMAL, 1.0), (TANGENT, 1.0)], [(PRIMAL, 2.0), (TANGENT, 2.0)]]
    jit(jax.hessian(lambda x: f(x).sum()))(x)
    messages = [messages[2:] for messages in each(rec)]
    for (primal, *others), value in zip(messages, plain(x), strict=True):
        assert primal == (PRIMAL, value)
        assert [transforms[0] for transforms, _ in others] == [JVP] * 3


@pytest.mark.parametrize("mapped", MAPS)
def test_vmap_inside_and_around_a_mapped_function(jit: Jit, mapped: Any, rec: Recorder) -> None:
    x = jnp.arange(4).reshape(2, 2)
    jit(mapped(jax.vmap(lambda x: hcb.id_tap(rec, x))))(x)
    assert each(rec) == [[((batch(0),), [0, 1])], [((batch(0),), [2, 3])]]
    jit(jax.vmap(mapped(lambda x: hcb.id_tap(rec, x))))(x)
    assert [messages[1:] for messages in each(rec)] == [[((batch(0),), [0, 2])], [((batch(0),), [1, 3])]]


@pytest.mark.parametrize("mapped", MAPS)
def test_a_checkpoint_inside_and_around_a_mapped_function(jit: Jit, mapped: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(hcb.id_tap(rec, lax.psum(x, AXIS)))

    x = jnp.array([0.25, 0.25])
    jit(jax.grad(lambda x: mapped(jax.checkpoint(f))(x).sum()))(x)
    jit(jax.grad(lambda x: jax.checkpoint(mapped(f))(x).sum()))(x)
    assert each(rec) == [[(PRIMAL, 0.5), (COTANGENT, 0.8776)] * 2] * 2


@pytest.mark.parametrize("mapped", MAPS)
def test_devices_that_go_different_ways(jit: Jit, mapped: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        x = lax.while_loop(lambda c: c < 3, lambda c: hcb.id_tap(rec, c + 1), x)
        return lax.cond(
            lax.axis_index(AXIS) == 0, lambda x: hcb.id_tap(rec, 10 * x), lambda x: hcb.id_tap(rec, -x), x
        )

    jit(mapped(f))(jnp.array([0, 2]))
    assert each(rec) == [[(PRIMAL, v) for v in values] for values in ([1, 2, 3, 30], [3, -3])]


@pytest.mark.parametrize("mapped", MAPS)
def test_a_tap_whose_result_is_unused_in_a_mapped_function(jit: Jit, mapped: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(rec, 2 * x)
        hcb.id_tap(rec, 7.0)
        return x

    jit(mapped(f))(jnp.array([1.0, 2.0]))
    jit(jax.grad(lambda x: mapped(f)(x).sum()))(jnp.array([1.0, 2.0]))
    assert each(rec) == [[(PRIMAL, 2.0), (PRIMAL, 7.0)] * 2, [(PRIMAL, 4.0), (PRIMAL, 7.0)] * 2]


def test_pmap_with_in_axes_and_out_axes(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return hcb.id_tap(rec, {"x": x, "y": y})["x"]

    x = jnp.arange(8).reshape(2, 4)
    out = jit(in_pmap(f, in_axes=(1, None), out_axes=1))(x, 9)
    np.testing.assert_array_equal(out, x)
    assert each(rec, 4) == [[(PRIMAL, {"x": [i, i + 4], "y": 9})] for i in range(4)]


def test_pmap_with_static_and_donated_arguments(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, factor: int) -> Any:
        return hcb.id_tap(rec, x * factor, factor=factor)

    mapped = jax.pmap(f, static_broadcasted_argnums=1, donate_argnums=0)
    jit(lambda x: mapped(x, 3))(jnp.array([1, 2]))
    assert each(rec) == [[(PRIMAL, 3)], [(PRIMAL, 6)]]
    assert [kwargs["factor"] for kwargs in rec.kwargs] == [3, 3]


def test_pmap_on_devices_of_choice_names_them(rec: Recorder) -> None:
    chosen = jax.devices()[2:]
    jax.pmap(lambda x: hcb.id_tap(rec, x), devices=chosen)(jnp.array([1, 2]))
    assert [delivered(rec, device) for device in chosen] == [[(PRIMAL, 1)], [(PRIMAL, 2)]]
    assert len(rec) == 2


def test_shard_map_with_a_replicated_operand_taps_it_on_every_device(jit: Jit, rec: Recorder) -> None:
    mesh, whole = Mesh(jax.devices()[:2], (AXIS,)), PartitionSpec()

    def loss(x: Any) -> Any:
        per_device = jax.shard_map(
            lambda x: hcb.id_tap(rec, x) ** 2, mesh=mesh, in_specs=whole, out_specs=whole
        )
        return per_device(x).sum()

    jit(jax.grad(loss))(jnp.array([1.0, 2.0]))
    messages = [(PRIMAL, [1.0, 2.0]), (COTANGENT, [2.0, 4.0])]
    assert each(rec) == [messages, messages]
