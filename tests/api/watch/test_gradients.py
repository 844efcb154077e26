"""The backward pass, whether the watched function is differentiated, or the gradient is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from watching import errors_of, line_of

import hostcallback as hcb

ROWS = jnp.ones((4, 3)).at[2].set(0.0)
"""A row has the norm 0."""


def normalized(w: Any, x: Any) -> Any:
    h = x * w
    return ((h / jnp.linalg.norm(h, axis=-1, keepdims=True)) ** 2).mean()  # normalized


@pytest.mark.parametrize("mode", ["results", "every"])
def test_operations_of_one_line_are_reported_apart_from_those_of_its_derivative(mode: Any) -> None:
    step = hcb.watch_nonfinite(jax.jit(jax.value_and_grad(normalized)), mode=mode)
    errors = errors_of(lambda: step(jnp.ones(3), ROWS))
    divisions = {(e.shape, e.nan_count, e.inf_count, e.check.count) for e in errors if e.primitive == "div"}
    assert ((4, 3), 3, 0, 1) in divisions
    assert ((4, 1), 0, 1, 1) in divisions
    assert {e.source_line.line for e in errors if e.source_line} == {line_of(__file__, "normalized")}


X = jnp.array([3.0, 2.0, 1.0, 0.5])


def found(errors: list[hcb.NonFiniteError]) -> list[tuple[Any, ...]]:
    return [
        (e.primitive, e.source_line and e.source_line.line, e.nan_count, e.inf_count, e.iteration, e.backward)
        for e in errors
    ]


def trapped(x: Any) -> Any:
    y = x * 1.0
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(y), 0.0))  # trap


@jax.custom_vjp
def bad_backward(x: Any) -> Any:
    return x * 2


def forward(x: Any) -> Any:
    return x * 2, x


def backward(x: Any, ct: Any) -> Any:
    return (ct / (x - x),)


bad_backward.defvjp(forward, backward)


@jax.custom_vjp
def bad_forward(x: Any) -> Any:
    return x * 2


def forward_with_log(x: Any) -> Any:
    return jnp.log(x - 1.5), x


bad_forward.defvjp(forward_with_log, lambda x, ct: (ct,))


@jax.custom_jvp
def bad_jvp(x: Any) -> Any:
    return x * 2


bad_jvp.defjvp(lambda primals, tangents: (jnp.log(-primals[0]), tangents[0]))


def test_a_nan_behind_a_where_that_the_gradient_meets() -> None:
    errors = errors_of(lambda: jax.jit(jax.grad(hcb.watch_nonfinite(trapped)))(jnp.array([4.0, 0.0])))
    # The derivative of sqrt at 0, which JAX computes on the way forward.
    assert found(errors) == [("div", line_of(__file__, "trap"), 0, 1, (), False)]
    assert "    return jnp.sum(jnp.where(x > 0, jnp.sqrt(y), 0.0))  # trap" in str(errors[0])


@pytest.mark.parametrize("inside", [True, False])
def test_the_backward_pass_is_distinguished(inside: bool) -> None:
    def f(x, w):
        y = x * w  # overflows backwards
        return jnp.sum(y * w)

    gradient = (
        jax.jit(jax.grad(hcb.watch_nonfinite(f))) if inside else hcb.watch_nonfinite(jax.jit(jax.grad(f)))
    )
    (error,) = errors_of(lambda: gradient(X * 1e-30, jnp.float32(1e30)))
    assert found([error]) == [("mul", line_of(__file__, "overflows backwards"), 0, 4, (), True)]
    assert str(error).startswith("backward pass, mul: 0 NaN and 4 infinite values in float32[4], ")


def test_iterations_in_the_backward_pass_match_the_forward_pass() -> None:
    def f(x):
        def step(c, y):
            return 0.5 * c + 0.5 * divided_backward(c, y), None  # backward in scan

        return lax.scan(step, 1.0, x)[0]

    for length in (3, 4000):
        x = jnp.ones(length).at[1].set(0)
        (error,) = errors_of(lambda x=x: jax.jit(jax.grad(hcb.watch_nonfinite(f)))(x))
        assert found([error]) == [("div", line_of(__file__, "backward in scan"), 0, 1, (1,), True)]


@jax.custom_vjp
def divided_backward(c: Any, y: Any) -> Any:
    return c * y


divided_backward.defvjp(lambda c, y: (c * y, y), lambda y, ct: (ct, ct / y))


def test_the_rules_of_custom_vjp_are_looked_into() -> None:
    def grad_of(f: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
        return lambda: jax.jit(jax.value_and_grad(hcb.watch_nonfinite(lambda x: jnp.sum(f(x)))))(x)

    (error,) = errors_of(grad_of(bad_backward, X))
    # The lines are those of the call: JAX attributes every operation in a rule of custom_vjp to it.
    assert (error.primitive, error.inf_count, error.backward) == ("div", 4, True)
    (error,) = errors_of(grad_of(bad_forward, X))
    assert (error.primitive, error.nan_count, error.backward) == ("log", 2, False)


def test_the_rule_of_custom_jvp_is_looked_into() -> None:
    (error,) = errors_of(
        lambda: jax.jit(jax.value_and_grad(hcb.watch_nonfinite(lambda x: jnp.sum(bad_jvp(x)))))(X)
    )
    assert (error.primitive, error.nan_count, error.backward) == ("log", 4, False)


def test_what_a_checkpoint_computes_again_is_not_of_the_backward_pass() -> None:
    def f(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.log(x - 1.5)))(x))

    (error,) = errors_of(lambda: jax.jit(jax.grad(hcb.watch_nonfinite(f)))(X))
    assert (error.primitive, error.backward) == ("log", False)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_the_scopes_around_a_checkpoint_are_named_once(outer: Any) -> None:
    @jax.checkpoint
    def layer(x: Any) -> Any:
        with jax.named_scope("layer"):
            return divided_backward(x, 0 * x)

    def f(x: Any) -> Any:
        with jax.named_scope("model"):
            return jnp.sum(layer(x))

    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(jax.grad(outer(f))))(X))
    assert (error.primitive, error.scope, error.backward) == ("div", "model/layer", True)


def test_the_device_of_a_gradient_is_named() -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def per_device(x):
        return lax.psum(jnp.sum(divided_backward(x, x)), "i")

    f = jax.shard_map(per_device, mesh=mesh, in_specs=P("i"), out_specs=P())
    (error,) = errors_of(lambda: jax.jit(jax.grad(hcb.watch_nonfinite(f)))(X.at[2].set(0)))
    assert (error.primitive, error.device, error.nan_count + error.inf_count) == ("div", "cpu:2", 1)
    assert error.backward


def test_second_derivatives_are_watched() -> None:
    f = hcb.watch_nonfinite(lambda x: x**1.5)
    assert errors_of(lambda: jax.jit(jax.grad(jax.grad(f)))(0.0))
    assert not errors_of(lambda: jax.jit(jax.hessian(f))(1.0))


@pytest.mark.parametrize(
    ("loss", "part"),
    [
        (lambda w: jnp.sum(jnp.sqrt(w)), "div is part of sqrt or its derivative"),
        (lambda w: jnp.sum(jnp.arccos(1 + w)), "rsqrt is part of arccos or its derivative"),
        (lambda w: jnp.log(jnp.sum(w) - 1), ""),
    ],
    ids=["sqrt", "arccos", "log"],
)
def test_the_report_names_the_function_whose_derivative_the_operation_is_of(loss: Any, part: str) -> None:
    error, *_ = errors_of(lambda: hcb.watch_nonfinite(jax.jit(jax.value_and_grad(loss)))(jnp.zeros(2)))
    assert (part in str(error)) if part else ("is part of" not in str(error))
