"""Custom derivative rules: a tap in a rule fires untransformed, and a tap in the function only where it runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, PRIMAL, TANGENT, Jit, batch, delivered, places


def with_jvp_rule(rec: Recorder) -> Any:
    """x -> 3 x, with the derivative 5 and a tap everywhere."""

    @jax.custom_jvp
    def f(x: Any) -> Any:
        return 3 * hcb.id_tap(rec, x, place="function")

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return 3 * hcb.id_tap(rec, x, place="rule"), 5 * hcb.id_tap(rec, t, place="tangent in rule")

    return f


def with_vjp_rule(rec: Recorder) -> Any:
    """x -> 3 x, with the derivative 5 and a tap everywhere."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return 3 * hcb.id_tap(rec, x, place="function")

    def forward(x: Any) -> Any:
        return 3 * hcb.id_tap(rec, x, place="forward"), 5.0

    def backward(factor: Any, g: Any) -> Any:
        return (factor * hcb.id_tap(rec, g, place="backward"),)

    f.defvjp(forward, backward)
    return f


@pytest.mark.parametrize("make", [with_jvp_rule, with_vjp_rule])
def test_without_differentiation_the_function_taps(jit: Jit, make: Any, rec: Recorder) -> None:
    assert float(jit(make(rec))(2.0)) == 6.0
    assert places(rec) == [("function", 2.0)]
    assert rec.transforms == [PRIMAL]


def test_custom_jvp_under_jvp_delivers_its_rules_taps(jit: Jit, rec: Recorder) -> None:
    f = with_jvp_rule(rec)
    jit(lambda x: jax.jvp(f, (x,), (0.5,)))(2.0)
    assert places(rec) == [("rule", 2.0), ("tangent in rule", 0.5)]
    # For JAX the rule's tangent is a value like any other: no program differentiates the rule here.
    assert rec.transforms == [PRIMAL, PRIMAL]


def test_custom_jvp_under_grad_taps_its_rule_and_the_cotangent_of_the_rules_tangent(
    jit: Jit, rec: Recorder
) -> None:
    assert float(jit(jax.grad(with_jvp_rule(rec)))(2.0)) == 5.0
    assert places(rec) == [("rule", 2.0), ("tangent in rule", 5.0)]
    assert rec.transforms == [PRIMAL, (("transpose", {}),)]


def test_custom_vjp_under_grad_taps_forward_and_backward_once(jit: Jit, rec: Recorder) -> None:
    assert float(jit(jax.grad(lambda x: 7 * with_vjp_rule(rec)(x)))(2.0)) == 35.0
    assert places(rec) == [("forward", 2.0), ("backward", 7.0)]
    assert rec.transforms == [PRIMAL, PRIMAL]


def test_vjp_of_custom_vjp_taps_backward_at_each_call(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        _, pull_back = jax.vjp(with_vjp_rule(rec), x)
        return pull_back(1.0), pull_back(2.0)

    jit(f)(2.0)
    assert places(rec) == [("forward", 2.0), ("backward", 1.0), ("backward", 2.0)]


def test_custom_rules_in_a_scan(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (with_vjp_rule(rec)(c), None), x, None, length=2)[0]

    jit(jax.grad(f))(1.0)
    assert places(rec) == [("forward", 1.0), ("forward", 3.0), ("backward", 1.0), ("backward", 5.0)]


def test_custom_rules_in_a_checkpoint(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(jax.checkpoint(lambda x: jnp.square(with_vjp_rule(rec)(x)))))(1.0)
    assert places(rec) == [("forward", 1.0), ("backward", 6.0)]
    jit(jax.grad(jax.checkpoint(lambda x: jnp.square(with_jvp_rule(rec)(x)))))(1.0)
    assert places(rec)[2:] == [("rule", 1.0), ("tangent in rule", 30.0)]


def test_custom_rules_under_vmap(jit: Jit, rec: Recorder) -> None:
    jit(jax.vmap(jax.grad(with_vjp_rule(rec))))(jnp.arange(2.0))
    assert places(rec) == [("forward", [0.0, 1.0]), ("backward", 1.0)]
    jit(jax.grad(lambda x: jax.vmap(with_vjp_rule(rec))(x).sum()))(jnp.arange(2.0))
    assert places(rec)[2:] == [("forward", [0.0, 1.0]), ("backward", [1.0, 1.0])]
    assert rec.transforms == [(batch(0),), PRIMAL, (batch(0),), (batch(0),)]


def test_a_custom_rule_for_vmap(jit: Jit, rec: Recorder) -> None:
    @custom_vmap
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x, place="function")

    @f.def_vmap
    def _(size: int, batched: Any, x: Any) -> Any:
        return hcb.id_tap(rec, x, place="rule"), batched[0]

    jit(jax.vmap(f))(jnp.arange(3))
    assert places(rec) == [("rule", [0, 1, 2])]
    assert rec.transforms == [PRIMAL]


def test_custom_linear_solve_taps_the_solver_each_way(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def solve(_: Any, b: Any) -> Any:
            return hcb.id_tap(rec, b / 2, place="solve")

        return lax.custom_linear_solve(lambda v: 2 * v, x, solve, symmetric=True)

    jit(jax.grad(lambda x: 3 * f(x)))(1.0)
    assert places(rec) == [("solve", 0.5), ("solve", 1.5)]


def test_custom_root_taps_the_solver_and_the_function_it_linearizes(jit: Jit, rec: Recorder) -> None:
    def root(a: Any) -> Any:
        def solve(_: Any, start: Any) -> Any:
            return hcb.id_tap(rec, jnp.sqrt(lax.stop_gradient(a)), place="solve")

        return lax.custom_root(
            lambda v: hcb.id_tap(rec, v * v - a, place="f"), 1.0, solve, lambda g, y: y / g(1.0)
        )

    assert float(jit(jax.grad(root))(4.0)) == 0.25
    # At the root f is linearized twice: for the slope that the tangent solver asks for, and for the cotangent of a.
    assert places(rec) == [("solve", 2.0), ("f", 0.0), ("f", 0.0), ("f", 4.0), ("f", -0.25)]
    assert rec.transforms == [PRIMAL, PRIMAL, PRIMAL, TANGENT, COTANGENT]


def test_a_function_with_a_rule_for_vmap_that_is_not_used(jit: Jit, rec: Recorder) -> None:
    one_by_one = sequential_vmap(lambda x: hcb.id_tap(rec, x))
    if jax.__version_info__ < (0, 9):  # lowers the function without the token of its effects
        with pytest.raises(KeyError, match="TapEffect"):
            jit(jax.vmap(one_by_one))(jnp.arange(3))
        return
    jit(one_by_one)(7)
    jit(jax.vmap(one_by_one))(jnp.arange(3))
    assert delivered(rec) == [(PRIMAL, 7), (PRIMAL, 0), (PRIMAL, 1), (PRIMAL, 2)]


# ---- Functions and rules that close over values of the programs around them ------------------------------------------


def jvp_closing_over(rec: Recorder, y: Any) -> Any:
    """x -> 3 x, with the derivative 5 and taps of `y`."""

    @jax.custom_jvp
    def f(x: Any) -> Any:
        hcb.id_tap(rec, y, place="function")
        return 3 * x

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        hcb.id_tap(rec, y, place="rule")
        return 3 * primals[0], 5 * tangents[0]

    return f


def vjp_closing_over(rec: Recorder, y: Any) -> Any:
    """x -> 3 x, with the derivative 5 and taps of `y`."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        hcb.id_tap(rec, y, place="function")
        return 3 * x

    def forward(x: Any) -> Any:
        hcb.id_tap(rec, y, place="forward")
        return 3 * x, ()

    def backward(_: Any, g: Any) -> Any:
        hcb.id_tap(rec, y, place="backward")
        return (5 * g,)

    f.defvjp(forward, backward)
    return f


CLOSING = pytest.mark.parametrize(
    ("make", "rules"), [(jvp_closing_over, ["rule"]), (vjp_closing_over, ["forward", "backward"])]
)


@CLOSING
def test_a_function_or_rule_taps_a_value_of_the_program_around_it(
    make: Any, rules: list[str], rec: Recorder
) -> None:
    def f(x: Any, y: Any) -> Any:
        return make(rec, y)(x)

    assert float(jax.jit(f)(2.0, 7.0)) == 6.0
    assert float(jax.jit(lambda y: jax.jit(lambda: f(2.0, y))())(8.0)) == 6.0
    assert places(rec) == [("function", 7.0), ("function", 8.0)]
    assert float(jax.jit(jax.grad(f))(2.0, 7.0)) == 5.0
    assert places(rec)[2:] == [(rule, 7.0) for rule in rules]


@CLOSING
def test_a_function_taps_a_value_of_the_loop_or_vmap_around_it(make: Any, rules: Any, rec: Recorder) -> None:
    def loop(x: Any, ys: Any) -> Any:
        return lax.scan(lambda c, y: (make(rec, y)(c), None), x, ys)[0]

    def closing(x: Any, y: Any) -> Any:
        return make(rec, y)(x)

    ys = jnp.array([7.0, 8.0])
    assert float(jax.jit(loop)(2.0, ys)) == 18.0
    jax.jit(jax.vmap(closing, (0, None)))(ys, 9.0)
    jax.jit(jax.vmap(closing, (None, 0)))(2.0, ys)
    assert places(rec) == [
        ("function", 7.0), ("function", 8.0), ("function", 9.0), ("function", [7.0, 8.0]),
    ]  # fmt: skip


def test_a_print_a_check_and_a_call_of_a_value_around_a_function_with_a_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def f(x: Any, y: Any) -> Any:
        @jax.custom_jvp
        def inner(x: Any) -> Any:
            hcb.print("y is {}", y)
            hcb.check(y < 0, "y must be negative, is {}", y)
            return x + hcb.call(lambda y: 2 * y, y, result_shape=y)

        inner.defjvps(lambda t, out, x: t)
        return inner(x)

    assert float(jax.jit(f)(1.0, 7.0)) == 15.0
    with pytest.raises(ExceptionGroup, match="y must be negative"):
        hcb.barrier_wait()
    assert capsys.readouterr().out == "y is 7.0\n"
