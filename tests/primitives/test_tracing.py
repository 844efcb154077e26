"""Tracing delivers nothing, running does: `disable_jit`, `make_jaxpr`, `eval_shape`, ahead-of-time compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, PRIMAL, Jit, batch, delivered


def program(rec: Recorder) -> Any:
    """Taps 2 x, then 2 x + 1 in a nested jit, then each of two steps of a scan, then in a branch: 5 messages."""

    @jax.jit
    def nested(x: Any) -> Any:
        return hcb.id_tap(rec, x + 1)

    def f(x: Any) -> Any:
        x = nested(hcb.id_tap(rec, 2 * x))
        x = lax.scan(lambda c, _: (hcb.id_tap(rec, c + 1), None), x, None, length=2)[0]
        return lax.cond(x > 0, lambda x: hcb.id_tap(rec, x + 1), lambda x: x, x)

    return f


AT_THREE = [(PRIMAL, value) for value in (6.0, 7.0, 8.0, 9.0, 10.0)]


def test_disable_jit_taps_eagerly(jit: Jit, rec: Recorder) -> None:
    with jax.disable_jit():
        jit(program(rec))(3.0)
        assert delivered(rec) == AT_THREE


def test_disable_jit_under_grad_and_vmap(jit: Jit, rec: Recorder) -> None:
    with jax.disable_jit():
        assert float(jit(jax.grad(program(rec)))(3.0)) == 2.0
        jit(jax.vmap(lambda x: hcb.id_tap(rec, x)))(jnp.arange(2))
    messages = delivered(rec)
    assert [message for message in messages if message[0] == PRIMAL] == AT_THREE
    assert [message for message in messages if message[0] == COTANGENT] == [(COTANGENT, 1.0)] * 5
    assert messages[-1] == ((batch(0),), [0, 1])


def test_make_jaxpr_delivers_nothing_and_running_the_jaxpr_does(jit: Jit, rec: Recorder) -> None:
    jaxpr = jax.make_jaxpr(jit(program(rec)))(3.0)
    assert delivered(rec) == []
    assert "tap[" in str(jaxpr)
    jaxpr_as_fun(jaxpr)(3.0)
    assert delivered(rec) == AT_THREE


def test_eval_shape_delivers_nothing(jit: Jit, rec: Recorder) -> None:
    assert jax.eval_shape(jit(program(rec)), 3.0).shape == ()
    assert jax.eval_shape(jax.grad(jit(program(rec))), 3.0).shape == ()
    assert delivered(rec) == []


def test_a_program_compiled_ahead_of_time_delivers_at_every_call(rec: Recorder) -> None:
    x = jnp.float32(3.0)
    lowered = jax.jit(program(rec)).lower(x)
    compiled = lowered.compile()
    lowered.as_text()
    compiled.cost_analysis()
    assert delivered(rec) == []
    for _ in range(3):
        compiled(x)
    assert delivered(rec) == AT_THREE * 3


def test_a_transformed_program_compiled_ahead_of_time(rec: Recorder) -> None:
    f = jax.jit(jax.vmap(jax.grad(lambda x: hcb.id_tap(rec, x) ** 2)))
    compiled = f.trace(jnp.ones(2)).lower().compile()
    compiled(jnp.array([1.0, 2.0]))
    assert delivered(rec) == [((batch(0),), [1.0, 2.0]), ((*COTANGENT, batch(0)), [2.0, 4.0])]


def test_a_program_for_several_devices_compiled_ahead_of_time(rec: Recorder) -> None:
    spec = PartitionSpec("i")
    mesh = Mesh(jax.devices()[:2], ("i",))
    f = jax.jit(jax.shard_map(lambda x: hcb.id_tap(rec, x), mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.device_put(jnp.arange(2), jax.sharding.NamedSharding(mesh, spec))
    f.lower(x).compile()(x)
    assert [delivered(rec, device) for device in jax.devices()[:2]] == [[(PRIMAL, [0])], [(PRIMAL, [1])]]


def test_a_pmapped_program_compiled_ahead_of_time(rec: Recorder) -> None:
    x = jnp.arange(2)
    jax.pmap(lambda x: hcb.id_tap(rec, x)).lower(x).compile()(x)
    assert [delivered(rec, device) for device in jax.devices()[:2]] == [[(PRIMAL, 0)], [(PRIMAL, 1)]]


def test_a_tap_evaluated_at_compile_time_fires_when_it_is_traced(rec: Recorder) -> None:
    @jax.jit
    def f(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            hcb.id_tap(rec, jnp.int32(1))
        return hcb.id_tap(rec, x)

    f(2)
    f(3)
    assert delivered(rec) == [(PRIMAL, 1), (PRIMAL, 2), (PRIMAL, 3)]
