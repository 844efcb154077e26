"""Values that depend only on a loop's constants are tapped in every iteration under differentiation, too.

JAX moves such code out of a scan when it differentiates it, effects included: `jax.debug.callback` fires once for five
iterations (jax#16637), and not at all where a `cond` holds it.
"""

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
from transforming import COTANGENT, PRIMAL, Jit, delivered

Tap = Callable[[Any], Any]

DIFFERENTIATIONS = [
    pytest.param(jax.grad, id="grad"),
    pytest.param(lambda f: lambda x: jax.jvp(f, (x,), (1.0,)), id="jvp"),
    pytest.param(lambda f: lambda x: jax.linearize(f, x)[0], id="linearize"),
    pytest.param(jax.hessian, id="hessian"),
    pytest.param(lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]), id="vmap of grad"),
    pytest.param(lambda f: jax.grad(jax.checkpoint(f)), id="grad of checkpoint"),
    pytest.param(
        lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)),
        id="grad of checkpoint that saves everything",
    ),
]


@pytest.mark.parametrize("differentiate", DIFFERENTIATIONS)
def test_a_tap_of_a_constant_in_a_scan_of_five_fires_five_times(
    jit: Jit, differentiate: Any, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.id_tap(rec, 1.0)
            return c * x, None

        return lax.scan(step, 1.0, None, length=5)[0]

    jit(differentiate(f))(jnp.float32(2.0))
    assert delivered(rec) == [(PRIMAL, 1.0)] * 5


def test_a_tap_of_a_differentiated_but_loop_invariant_value(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (c * hcb.id_tap(rec, x * x), None), 1.0, None, length=3)[0]

    jit(jax.grad(f))(1.0)
    assert delivered(rec) == [(PRIMAL, 1.0)] * 3 + [(COTANGENT, 1.0)] * 3


def test_fori_loop_and_nested_scans(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def inner(c: Any, _: Any) -> Any:
            hcb.id_tap(rec, 1.0)
            return c * x, None

        return lax.fori_loop(0, 3, lambda _, c: lax.scan(inner, c, None, length=2)[0], 1.0)

    jit(jax.grad(f))(2.0)
    assert delivered(rec) == [(PRIMAL, 1.0)] * 6


# Everything that can hold a tap, given constants only. Each taps once per call.


def in_jit(tap: Tap, x: Any) -> Any:
    return jax.jit(tap)(1.0)


def in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(lax.stop_gradient(x) > 0, tap, lambda v: v, 1.0)


def in_switch(tap: Tap, x: Any) -> Any:
    return lax.switch(jnp.int32(lax.stop_gradient(x)), [lambda v: v, lambda v: v, tap], 1.0)


def in_scan(tap: Tap, x: Any) -> Any:
    return lax.scan(lambda c, _: (tap(c), None), 1.0, None, length=1)[0]


def in_while_loop(tap: Tap, x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, tap(c[1])), (0, 1.0))[1]


def in_condition(tap: Tap, x: Any) -> Any:
    return lax.while_loop(lambda c: tap(c) < 1.0, lambda c: c + 1, 1.0)


def in_custom_jvp(tap: Tap, x: Any) -> Any:
    f = jax.custom_jvp(tap)
    f.defjvp(lambda primals, tangents: (tap(*primals), *tangents))
    return f(1.0)


def in_custom_vjp(tap: Tap, x: Any) -> Any:
    f = jax.custom_vjp(tap)
    f.defvjp(lambda v: (tap(v), None), lambda _, g: (g,))
    return f(1.0)


def in_checkpoint(tap: Tap, x: Any) -> Any:
    return jax.checkpoint(tap)(1.0)


def in_shard_map(tap: Tap, x: Any) -> Any:
    spec = PartitionSpec()
    mesh = Mesh(jax.devices()[:1], ("i",))
    return jax.shard_map(tap, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(1.0)


def in_vmap(tap: Tap, x: Any) -> Any:
    return jax.vmap(lambda _: tap(jnp.float32(1.0)))(jnp.zeros(2)).sum()


CONSTRUCTS = [
    in_jit, in_cond, in_switch, in_scan, in_while_loop, in_condition, in_custom_jvp, in_custom_vjp, in_checkpoint,
    in_shard_map, in_vmap,
]  # fmt: skip


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("construct", CONSTRUCTS)
@pytest.mark.parametrize("differentiate", [DIFFERENTIATIONS[0], DIFFERENTIATIONS[5]])
def test_a_tap_in_a_construct_that_takes_constants_only(
    jit: Jit, differentiate: Any, construct: Any, used: bool, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            value = construct(lambda v: hcb.id_tap(rec, v), x)
            return c * x * (value if used else 1.0), None

        return lax.scan(step, 1.0, None, length=3)[0]

    gradient = jit(differentiate(f))(2.0)
    assert delivered(rec) == [(PRIMAL, 1.0)] * 3
    factor = 2.0 if used and construct is in_vmap else 1.0
    np.testing.assert_allclose(gradient, 3 * 2.0**2 * factor**3)


def test_untapped_code_still_leaves_the_loop(jit: Jit, rec: Recorder) -> None:
    # Otherwise a tap would make every iteration save values that it computes from the loop's constants.
    def f(x: Any, w: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.id_tap(rec, 1.0)
            return c * jnp.sin(w), None

        return lax.scan(step, x, None, length=7)[0].sum()

    jaxpr = jax.make_jaxpr(jit(jax.grad(f)))(jnp.ones(5), jnp.ones(5))
    assert "f32[7,5]" not in str(jaxpr)
    assert "f32[7,5]" in str(
        jax.make_jaxpr(jax.grad(f, argnums=1))(jnp.ones(5), jnp.ones(5))
    )  # it can be told


def test_a_loop_that_reads_and_writes_a_reference(jit: Jit, rec: Recorder) -> None:
    new_ref = getattr(jax, "new_ref", None) or jax.array_ref  # 0.8 has both names, later ones the first

    def f(x: Any) -> Any:
        counter = new_ref(jnp.int32(0))

        def step(c: Any, _: Any) -> Any:
            counter[...] = counter[...] + 1
            hcb.id_tap(rec, counter[...])
            hcb.id_tap(rec, 7)
            return c * x, None

        return lax.scan(step, 1.0, None, length=2)[0]

    jit(lambda x: jax.linearize(f, x)[0])(2.0)  # JAX 0.10 cannot transpose it, tapped or not
    assert delivered(rec) == [(PRIMAL, 1), (PRIMAL, 7), (PRIMAL, 2), (PRIMAL, 7)]
