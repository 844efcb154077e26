"""Differentiation: primal values are tapped once, tangents and cotangents with `transforms` that mark them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, JVP, PRIMAL, TANGENT, TRANSPOSE, Jit, batch, delivered


def test_without_a_transformation_a_tap_is_an_identity_and_delivers_once(jit: Jit, rec: Recorder) -> None:
    out = jit(lambda x: hcb.id_tap(rec, x * 2) + 1)(3.0)
    assert delivered(rec) == [(PRIMAL, 6.0)]
    assert float(out) == 7.0
    assert rec.devices == [jax.devices()[0]]


def test_a_tap_function_gets_transforms_and_device_only_if_it_takes_them(jit: Jit) -> None:
    seen: list[Any] = []

    def neither(x: Any) -> None:
        seen.append(float(x))

    def transforms_only(x: Any, transforms: Any) -> None:
        seen.append((float(x), transforms))

    def device_only(x: Any, *, device: Any) -> None:
        seen.append((float(x), device))

    def f(x: Any) -> Any:
        return hcb.id_tap(device_only, hcb.id_tap(transforms_only, hcb.id_tap(neither, x)))

    jit(lambda x: jax.jvp(f, (x,), (1.0,)))(2.0)
    hcb.barrier_wait()
    device = jax.devices()[0]
    assert seen == [2.0, 1.0, (2.0, PRIMAL), (1.0, TANGENT), (2.0, device), (1.0, device)]


def test_jvp_taps_the_primal_and_then_the_tangent(jit: Jit, rec: Recorder) -> None:
    jit(lambda x, t: jax.jvp(lambda x: hcb.id_tap(rec, 2.0 * x), (x,), (t,)))(3.0, 0.25)
    assert delivered(rec) == [(PRIMAL, 6.0), (TANGENT, 0.5)]


def test_grad_taps_the_primal_and_then_the_cotangent(jit: Jit, rec: Recorder) -> None:
    gradient = jit(jax.grad(lambda x: 3.0 * hcb.id_tap(rec, x * x)))(5.0)
    assert delivered(rec) == [(PRIMAL, 25.0), (COTANGENT, 3.0)]
    assert float(gradient) == 30.0


def test_jvp_of_jvp_taps_each_tangent_once(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x * x)

    def tangent(x: Any) -> Any:
        return jax.jvp(f, (x,), (1.0,))[1]

    jit(lambda x: jax.jvp(tangent, (x,), (1.0,)))(3.0)
    assert delivered(rec) == [(PRIMAL, 9.0), (TANGENT, 6.0), (TANGENT, 6.0), ((JVP, JVP), 2.0)]


def test_grad_of_grad_stacks_its_transforms_in_order(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(jax.grad(lambda x: hcb.id_tap(rec, x) ** 3)))(2.0)
    # The first cotangent is a value that the second differentiation differentiates.
    expected = [(PRIMAL, 2.0), (COTANGENT, 12.0), ((*COTANGENT, JVP, TRANSPOSE), 1.0), (COTANGENT, 12.0)]
    assert delivered(rec) == expected


def test_hessian_taps_the_primal_once(jit: Jit, rec: Recorder) -> None:
    out = jit(jax.hessian(lambda x: (hcb.id_tap(rec, x) ** 3).sum()))(jnp.array([1.0, 2.0]))
    assert delivered(rec) == [
        (PRIMAL, [1.0, 2.0]),
        ((JVP, batch(0)), [[1.0, 0.0], [0.0, 1.0]]),
        ((JVP, TRANSPOSE, batch(0)), [[3.0, 12.0]]),
        ((JVP, TRANSPOSE, batch(0), JVP, batch(0)), [[[6.0, 0.0]], [[0.0, 12.0]]]),
    ]
    np.testing.assert_array_equal(out, [[6.0, 0.0], [0.0, 12.0]])


@pytest.mark.parametrize(
    ("jacobian", "expected"),
    [
        (jax.jacfwd, ((JVP, batch(0)), [[1.0, 0.0], [0.0, 1.0]])),
        (jax.jacrev, ((JVP, TRANSPOSE, batch(0)), [[3.0, 0.0], [0.0, 12.0]])),
    ],
    ids=["jacfwd", "jacrev"],
)
def test_a_jacobian_taps_the_primal_once_and_all_directions_in_one_message(
    jit: Jit, jacobian: Any, expected: Any, rec: Recorder
) -> None:
    jit(jacobian(lambda x: hcb.id_tap(rec, x) ** 3))(jnp.array([1.0, 2.0]))
    assert delivered(rec) == [(PRIMAL, [1.0, 2.0]), expected]


def test_linearize_taps_the_primal_once_and_a_tangent_at_each_call(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        out, linear = jax.linearize(lambda x: hcb.id_tap(rec, x) ** 3, x)
        return out, linear(1.0), linear(2.0)

    assert [float(v) for v in jit(f)(2.0)] == [8.0, 12.0, 24.0]
    assert delivered(rec) == [(PRIMAL, 2.0), (TANGENT, 1.0), (TANGENT, 2.0)]


def test_vjp_taps_the_primal_once_and_a_cotangent_at_each_call(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        _, pull_back = jax.vjp(lambda x: hcb.id_tap(rec, x) ** 3, x)
        return pull_back(1.0), pull_back(2.0)

    jit(f)(2.0)
    assert delivered(rec) == [(PRIMAL, 2.0), (COTANGENT, 12.0), (COTANGENT, 24.0)]


def test_vjp_that_is_never_called_taps_no_cotangent(jit: Jit, rec: Recorder) -> None:
    jit(lambda x: jax.vjp(lambda x: hcb.id_tap(rec, x) ** 3, x)[0])(2.0)
    assert delivered(rec) == [(PRIMAL, 2.0)]


def test_cotangents_are_tapped_in_reverse_order_whatever_their_value(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        _, pull_back = jax.vjp(lambda x, y: (hcb.id_tap(rec, x) ** 3, hcb.id_tap(rec, y)), x, y)
        return pull_back((1.0, 0.0))

    jit(f)(2.0, 3.0)
    assert delivered(rec) == [(PRIMAL, 2.0), (PRIMAL, 3.0), (COTANGENT, 0.0), (COTANGENT, 12.0)]


def test_a_leaf_without_a_cotangent_gets_zeros_next_to_one_that_has_one(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: hcb.id_tap(rec, (x, 2 * x))[0] * 3))(2.0)
    assert delivered(rec) == [(PRIMAL, (2.0, 4.0)), (COTANGENT, (3.0, 0.0))]


def test_a_tap_whose_result_is_unused_still_fires(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(rec, 2 * x)
        return 3 * x

    jit(f)(2.0)
    assert delivered(rec) == [(PRIMAL, 4.0)]
    jit(jax.grad(f))(2.0)
    assert delivered(rec)[1:] == [(PRIMAL, 4.0)]  # no cotangent: none flows back


def test_undifferentiated_values_are_tapped_once_and_nothing_else(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, constant: Any) -> Any:
        hcb.id_tap(rec, 1.0)
        hcb.id_tap(rec, constant)
        return x * hcb.id_tap(rec, jax.lax.stop_gradient(x))

    jit(jax.grad(f))(2.0, 3.0)
    assert delivered(rec) == [(PRIMAL, 1.0), (PRIMAL, 3.0), (PRIMAL, 2.0)]


@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (1.0,))])
def test_tangent_taps_can_be_turned_off_for_a_tap(jit: Jit, differentiate: Any, rec: Recorder) -> None:
    jit(differentiate(lambda x: hcb.id_tap(rec, x * x, tap_tangents=False)))(5.0)
    assert delivered(rec) == [(PRIMAL, 25.0)]


def test_tangent_taps_can_be_turned_off_for_the_process_and_on_for_a_tap(
    monkeypatch: pytest.MonkeyPatch, rec: Recorder
) -> None:
    def both(x: Any) -> Any:
        return hcb.id_tap(rec, hcb.id_tap(rec, x, tap_tangents=True) * 2)

    monkeypatch.setenv("HOSTCALLBACK_TAP_TANGENTS", "0")
    hcb.jit(jax.grad(both))(1.0)
    assert delivered(rec) == [(PRIMAL, 1.0), (PRIMAL, 2.0), (COTANGENT, 2.0)]
    monkeypatch.setenv("HOSTCALLBACK_TAP_TANGENTS", "1")  # read when a tap is traced
    hcb.jit(jax.grad(lambda x: hcb.id_tap(rec, x)))(1.0)
    assert delivered(rec)[3:] == [(PRIMAL, 1.0), (COTANGENT, 1.0)]


def test_a_wrong_value_of_the_tangents_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCALLBACK_TAP_TANGENTS", "no")
    with pytest.raises(ValueError, match="HOSTCALLBACK_TAP_TANGENTS='no': expected 0, 1 or nothing"):
        hcb.id_tap(print, 1.0)


def test_grad_of_nested_jits(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return 3.0 * jax.jit(lambda x: jax.jit(lambda x: hcb.id_tap(rec, x * x))(x))(x)

    assert float(jit(jax.grad(f))(5.0)) == 30.0
    assert delivered(rec) == [(PRIMAL, 25.0), (COTANGENT, 3.0)]


def test_a_nested_jit_whose_result_is_unused_still_taps(jit: Jit, rec: Recorder) -> None:
    g = jax.jit(lambda x: hcb.id_tap(rec, x))

    def f(x: Any) -> Any:
        hcb.id_tap(rec, x + 1)
        g(x + 2)
        hcb.id_tap(rec, x + 3)
        return 5 * x

    jit(f)(0.0)
    assert delivered(rec) == [(PRIMAL, 1.0), (PRIMAL, 2.0), (PRIMAL, 3.0)]
    jit(jax.grad(f))(0.0)
    assert delivered(rec)[3:] == [(PRIMAL, 1.0), (PRIMAL, 2.0), (PRIMAL, 3.0)]


def test_jvp_and_linearize_and_grad_of_a_jitted_function(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x) ** 3)
    jax.jvp(f, (2.0,), (0.5,))
    assert delivered(rec) == [(PRIMAL, 2.0), (TANGENT, 0.5)]
    out, linear = jax.linearize(f, 2.0)
    assert (float(out), float(linear(1.0))) == (8.0, 12.0)
    assert delivered(rec)[2:] == [(PRIMAL, 2.0), (TANGENT, 1.0)]
    jax.grad(f)(2.0)
    assert delivered(rec)[4:] == [(PRIMAL, 2.0), (COTANGENT, 12.0)]


def test_an_integer_leaf_has_a_float0_tangent_which_stays_on_the_host(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, n: Any) -> Any:
        x, n = hcb.id_tap(rec, (x, n))
        return x * n

    no_tangent = np.zeros((2,), jax.dtypes.float0)
    jit(lambda x, n: jax.jvp(f, (x, n), (1.0, no_tangent)))(2.0, jnp.array([3, 4]))
    assert delivered(rec) == [(PRIMAL, (2.0, [3, 4])), (TANGENT, (1.0, "float0"))]
    assert rec.values[1][1].shape == (2,)
    jit(jax.grad(lambda x, n: f(x, n).sum()))(2.0, jnp.array([3, 4]))
    assert delivered(rec)[2:] == [(PRIMAL, (2.0, [3, 4])), (COTANGENT, (7.0, "float0"))]
    assert rec.values[3][1].shape == (2,)


@pytest.mark.parametrize("value", [3, True, np.int8(7), np.uint16(9)], ids=str)
def test_integers_and_bools_are_tapped_once_under_grad(jit: Jit, value: Any, rec: Recorder) -> None:
    jit(jax.grad(lambda x: x * hcb.id_tap(rec, value)))(2.0)
    assert delivered(rec) == [(PRIMAL, value)]
    assert rec.values[0].dtype == jnp.asarray(value).dtype


def test_grad_with_respect_to_an_integer_input(jit: Jit, rec: Recorder) -> None:
    jit(lambda n: jax.grad(lambda n: hcb.id_tap(rec, n) * 2.0, allow_int=True)(n).shape)(3)
    assert delivered(rec) == [(PRIMAL, 3)]


def test_a_bool_that_depends_on_a_differentiated_value(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: 2 * hcb.id_tap(rec, {"positive": x > 0, "x": x})["x"]))(2.0)
    expected = [
        (PRIMAL, {"positive": True, "x": 2.0}),
        (COTANGENT, {"positive": "float0", "x": 2.0}),
    ]
    assert delivered(rec) == expected


def test_zero_size_arrays(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: hcb.id_tap(rec, x).sum()))(jnp.zeros((0, 3)))
    jit(jax.vmap(lambda x: hcb.id_tap(rec, x)))(jnp.zeros((2, 0)))
    assert [transforms for transforms, _ in delivered(rec)] == [PRIMAL, COTANGENT, (batch(0),)]
    assert [value.shape for value in rec.values] == [(0, 3), (0, 3), (2, 0)]


def test_donated_arguments(rec: Recorder) -> None:
    step = jax.jit(jax.value_and_grad(lambda x: hcb.id_tap(rec, x * x).sum()), donate_argnums=0)
    x = jnp.ones((64,))
    for _ in range(20):
        _, gradient = step(x)
        x = gradient / 2 + 1
    messages = delivered(rec)
    assert [value[0] for transforms, value in messages if transforms == PRIMAL] == [
        float(i * i) for i in range(1, 21)
    ]
    assert [value for transforms, value in messages if transforms == COTANGENT] == [[1.0] * 64] * 20


def test_named_call_and_named_scope_change_nothing(jit: Jit, rec: Recorder) -> None:
    def scoped(x: Any) -> Any:
        with jax.named_scope("inner"):
            return hcb.id_tap(rec, x * x)

    for f in (jax.named_call(lambda x: hcb.id_tap(rec, x * x), name="outer"), scoped):
        jit(jax.grad(f))(3.0)
    assert delivered(rec) == [(PRIMAL, 9.0), (COTANGENT, 1.0)] * 2
