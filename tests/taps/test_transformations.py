"""Whatever JAX does to a program, its taps arrive: counts, values, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


def no_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


JITS = [
    pytest.param(jax.jit, id="jax.jit"),
    pytest.param(hcb.jit, id="hcb.jit"),
    pytest.param(no_jit, id="no jit"),
]
COMPILED = JITS[:2]

JVP = ("jvp", {})
TRANSPOSE = ("transpose", {})


def batch(*dims: int | None) -> tuple[str, dict[str, Any]]:
    return ("batch", {"batch_dims": dims})


@pytest.fixture
def rec() -> Recorder:
    return Recorder()


@pytest.mark.parametrize("jit", JITS)
def test_tap_is_an_identity_and_delivers_once(jit: Jit, rec: Recorder) -> None:
    out = jit(lambda x: hcb.id_tap(rec, x * 2) + 1)(3.0)
    hcb.barrier_wait()
    assert float(out) == 7.0
    assert rec.floats() == [6.0]
    assert rec.transforms == [()]
    assert rec.devices == [jax.devices()[0]]


@pytest.mark.parametrize("jit", JITS)
def test_tap_whose_result_is_unused_still_fires(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(rec, x)
        return 0.0

    jit(f)(5.0)
    hcb.barrier_wait()
    assert rec.floats() == [5.0]


@pytest.mark.parametrize("inner", COMPILED)
@pytest.mark.parametrize("outer", COMPILED)
def test_tap_in_a_nested_jit_whose_result_is_unused_still_fires(
    outer: Jit, inner: Jit, rec: Recorder
) -> None:
    @inner
    def g(x: Any) -> Any:
        return hcb.id_tap(rec, x)

    @outer
    def f(x: Any) -> Any:
        hcb.id_tap(rec, x + 1)
        g(x + 2)
        hcb.id_tap(rec, x + 3)
        return x

    f(0.0)
    hcb.barrier_wait()
    assert rec.floats() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("jit", JITS)
def test_scan_taps_every_iteration_in_order(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, i: (hcb.id_tap(rec, c + i), None), x, jnp.arange(5.0))[0]

    out = jit(f)(0.0)
    hcb.barrier_wait()
    assert float(out) == 10.0
    assert rec.floats() == [0.0, 1.0, 3.0, 6.0, 10.0]


@pytest.mark.parametrize("jit", JITS)
def test_while_loop_taps_its_condition_and_its_body(jit: Jit, rec: Recorder) -> None:
    seen_by_condition = Recorder()

    def f(x: Any) -> Any:
        return lax.while_loop(
            lambda c: hcb.id_tap(seen_by_condition, c) < 3, lambda c: hcb.id_tap(rec, c) + 1, x
        )

    jit(f)(0)
    hcb.barrier_wait()
    assert rec.values == [0, 1, 2]
    assert seen_by_condition.values == [0, 1, 2, 3]


@pytest.mark.parametrize("jit", JITS)
def test_cond_taps_the_branch_that_is_taken(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 0, lambda x: hcb.id_tap(rec, x), lambda x: hcb.id_tap(rec, -100 * x), x)

    g = jit(f)
    g(2.0)
    g(-3.0)
    hcb.barrier_wait()
    assert rec.floats() == [2.0, 300.0]


@pytest.mark.parametrize("jit", JITS)
def test_switch_and_fori_loop(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        branches = [lambda x, k=k: hcb.id_tap(rec, x + 10 * k) for k in range(3)]
        return lax.fori_loop(0, 3, lambda i, c: lax.switch(i, branches, c), x)

    jit(f)(1.0)
    hcb.barrier_wait()
    assert rec.floats() == [1.0, 11.0, 31.0]


@pytest.mark.parametrize("jit", JITS)
def test_vmap_sends_one_message_with_the_batch(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return hcb.id_tap(rec, (x, y))[0]

    jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(3.0), 7.0)
    hcb.barrier_wait()
    assert len(rec) == 1
    np.testing.assert_array_equal(rec.values[0][0], [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(rec.values[0][1], 7.0)
    assert rec.transforms == [(batch(0, None),)]


@pytest.mark.parametrize("jit", JITS)
def test_nested_vmaps_stack_in_order(jit: Jit, rec: Recorder) -> None:
    jit(jax.vmap(jax.vmap(lambda x: hcb.id_tap(rec, x), in_axes=1), in_axes=0))(jnp.ones((2, 3, 4)))
    hcb.barrier_wait()
    assert rec.values[0].shape in {(2, 3, 4), (4, 2, 3), (2, 4, 3)}
    assert [name for name, _ in rec.transforms[0]] == ["batch", "batch"]


@pytest.mark.parametrize("jit", JITS)
def test_vmap_of_a_while_loop_with_a_batched_condition(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c < 3, lambda c: hcb.id_tap(rec, c) + 1, x)

    out = jit(jax.vmap(f))(jnp.array([0, 2]))
    hcb.barrier_wait()
    np.testing.assert_array_equal(out, [3, 3])
    assert len(rec) == 3  # as often as the longest element iterates


@pytest.mark.parametrize("jit", JITS)
def test_jvp_taps_the_primal_and_the_tangent(jit: Jit, rec: Recorder) -> None:
    jit(lambda x, t: jax.jvp(lambda x: hcb.id_tap(rec, 2.0 * x), (x,), (t,)))(3.0, 0.1)
    hcb.barrier_wait()
    assert rec.floats() == pytest.approx([6.0, 0.2])
    assert rec.transforms == [(), (JVP,)]


@pytest.mark.parametrize("jit", JITS)
def test_grad_taps_the_primal_and_the_cotangent(jit: Jit, rec: Recorder) -> None:
    value = jit(jax.grad(lambda x: 3.0 * hcb.id_tap(rec, x * x)))(5.0)
    hcb.barrier_wait()
    assert float(value) == 30.0
    assert rec.floats() == [25.0, 3.0]
    assert rec.transforms == [(), (JVP, TRANSPOSE)]


@pytest.mark.parametrize("jit", JITS)
def test_tangent_taps_can_be_turned_off(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: hcb.id_tap(rec, x * x, tap_tangents=False)))(5.0)
    hcb.barrier_wait()
    assert rec.floats() == [25.0]


@pytest.mark.parametrize("jit", JITS)
def test_grad_of_scan_taps_primals_forward_and_cotangents_backward(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, 2.0 * c), None), x, None, length=3)[0]

    out = jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    assert float(out) == 8.0
    assert rec.floats() == [2.0, 4.0, 8.0, 1.0, 2.0, 4.0]
    assert rec.transforms == [()] * 3 + [(JVP, TRANSPOSE)] * 3


@pytest.mark.parametrize("jit", JITS)
def test_grad_of_scan_of_five_taps_five_times(jit: Jit, rec: Recorder) -> None:
    # jax#16637: jax.debug.callback fires once, hoisted out of the loop.
    def f(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            hcb.id_tap(rec, jnp.float32(1.0), tap_tangents=False)
            return c * x, None

        return lax.scan(body, 1.0, None, length=5)[0]

    jit(jax.grad(f))(2.0)
    hcb.barrier_wait()
    assert rec.floats() == [1.0] * 5


@pytest.mark.parametrize("jit", JITS)
def test_grad_of_cond_and_fori(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        y = lax.cond(x > 0, lambda x: hcb.id_tap(rec, x * 2), lambda x: x, x)
        return lax.fori_loop(0, 2, lambda i, c: hcb.id_tap(rec, c * 3), y)

    out = jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    assert float(out) == 18.0
    primals = [v for v, t in zip(rec.floats(), rec.transforms, strict=True) if t == ()]
    cotangents = [v for v, t in zip(rec.floats(), rec.transforms, strict=True) if t == (JVP, TRANSPOSE)]
    assert primals == [2.0, 6.0, 18.0]
    assert cotangents == [1.0, 3.0, 9.0]


@pytest.mark.parametrize("jit", COMPILED)
def test_grad_of_jit_and_jit_of_grad_agree(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return 3.0 * hcb.id_tap(rec, x * x)

    jax.grad(jit(f))(5.0)
    hcb.barrier_wait()
    outside = (rec.floats(), list(rec.transforms))
    rec.__init__()  # type: ignore[misc]
    jit(jax.grad(f))(5.0)
    hcb.barrier_wait()
    assert (rec.floats(), rec.transforms) == outside


@pytest.mark.parametrize("jit", JITS)
def test_value_and_grad_with_integer_inputs_and_float0_tangents(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, n: Any) -> Any:
        x, n = hcb.id_tap(rec, (x, n))
        return x * n

    jit(lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (1.0,)))(2.0, 3)
    hcb.barrier_wait()
    assert rec.transforms == [(), (JVP,)]
    tangent_x, tangent_n = rec.values[1]
    assert float(tangent_x) == 1.0
    assert tangent_n.dtype == jax.dtypes.float0
    assert tangent_n.shape == ()


@pytest.mark.parametrize("jit", JITS)
def test_hessian_linearize_and_jvp_of_jit(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x) ** 3

    assert float(jit(jax.hessian(f))(2.0)) == 12.0
    hcb.barrier_wait()
    assert sum(t == () for t in rec.transforms) == 1
    rec.__init__()  # type: ignore[misc]
    out, linear = jax.linearize(jit(f), 2.0)
    assert (float(out), float(linear(1.0))) == (8.0, 12.0)
    hcb.barrier_wait()
    assert rec.floats() == [2.0, 1.0]
    assert rec.transforms == [(), (JVP,)]
    rec.__init__()  # type: ignore[misc]
    jax.jvp(jit(f), (2.0,), (0.5,))
    hcb.barrier_wait()
    assert rec.floats() == [2.0, 0.5]


@pytest.mark.parametrize("jit", JITS)
def test_vmap_of_grad_and_grad_of_vmap(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x) ** 2

    jit(jax.vmap(jax.grad(f)))(jnp.arange(3.0))
    hcb.barrier_wait()
    assert rec.transforms == [(batch(0),), (JVP, TRANSPOSE, batch(0))]
    np.testing.assert_array_equal(rec.values[1], [0.0, 2.0, 4.0])
    rec.__init__()  # type: ignore[misc]
    jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(jnp.arange(3.0))
    hcb.barrier_wait()
    assert rec.transforms == [(batch(0),), (batch(0), JVP, TRANSPOSE)]


@pytest.mark.parametrize("jit", JITS)
def test_custom_jvp_and_custom_vjp_forward_and_backward(jit: Jit, rec: Recorder) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x, place="primal")

    def forward(x: Any) -> Any:
        return hcb.id_tap(rec, x, place="forward"), None

    def backward(_: Any, g: Any) -> Any:
        return (hcb.id_tap(rec, g, place="backward") * 2,)

    f.defvjp(forward, backward)

    @jax.custom_jvp
    def h(x: Any) -> Any:
        return hcb.id_tap(rec, x, place="primal")

    @h.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return hcb.id_tap(rec, primals[0], place="rule"), tangents[0] * 5

    assert float(jit(f)(1.0)) == 1.0
    assert float(jit(jax.grad(f))(1.0)) == 2.0
    assert float(jit(jax.grad(h))(1.0)) == 5.0
    hcb.barrier_wait()
    assert [k["place"] for k in rec.kwargs] == ["primal", "forward", "backward", "rule"]


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable]
)
@pytest.mark.parametrize("jit", JITS)
def test_checkpoint_does_not_repeat_its_taps(jit: Jit, policy: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(hcb.id_tap(rec, jnp.sin(x), tap_tangents=False))

    jit(jax.grad(jax.checkpoint(f, policy=policy)))(1.0)
    hcb.barrier_wait()
    assert rec.floats() == pytest.approx([np.sin(1.0)])


@pytest.mark.parametrize("jit", JITS)
def test_lax_map_and_associative_scan(jit: Jit, rec: Recorder) -> None:
    jit(lambda x: lax.map(lambda v: hcb.id_tap(rec, v), x))(jnp.arange(4.0))
    hcb.barrier_wait()
    assert rec.floats() == [0.0, 1.0, 2.0, 3.0]
    rec.__init__()  # type: ignore[misc]
    jit(lambda x: lax.associative_scan(lambda a, b: hcb.id_tap(rec, a + b), x))(jnp.arange(4.0))
    hcb.barrier_wait()
    assert rec.values


@pytest.mark.parametrize("jit", COMPILED)
def test_donated_arguments(jit: Any, rec: Recorder) -> None:
    step = jit(lambda x: hcb.id_tap(rec, x + 1), donate_argnums=0)
    x = jnp.zeros((64,))
    for _ in range(20):
        x = step(x)
    hcb.barrier_wait()
    assert [v[0] for v in rec.values] == list(range(1, 21))


@pytest.mark.parametrize("jit", JITS)
def test_disable_jit_taps_eagerly(jit: Jit, rec: Recorder) -> None:
    with jax.disable_jit():
        jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(rec, c) + 1, None), x, None, length=3)[0])(0.0)
    hcb.barrier_wait()
    assert rec.floats() == [0.0, 1.0, 2.0]
