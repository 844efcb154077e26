"""The backward pass: watched from within, `grad(watch(f))`, and as part of the program, `watch(grad(f))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from watching import JITS, errors_of, line_of

import hostcallback as hcb
from transforming import COMPILED, Jit

X = jnp.array([3.0, 2.0, 1.0, 0.5])


def found(errors: list[hcb.NonFiniteError]) -> list[tuple[Any, ...]]:
    return [
        (e.primitive, e.source_line and e.source_line.line, e.nan_count, e.inf_count, e.iteration, e.backward)
        for e in errors
    ]


def trapped(x: Any) -> Any:
    y = x * 1.0  # trap's operand
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


@pytest.mark.parametrize("jit", JITS)
def test_a_cotangent_is_reported_with_the_operation_whose_result_it_belongs_to(jit: Jit) -> None:
    errors = errors_of(lambda: jit(jax.grad(hcb.watch_nonfinite(trapped)))(jnp.array([4.0, 0.0])))
    assert found(errors) == [
        ("mul", line_of(__file__, "trap's operand"), 1, 0, (), True),
        ("input x", None, 1, 0, (), True),
    ]
    assert errors[0].cotangent
    text = "backward pass, cotangent of mul: 1 NaN and 0 infinite values in float32[2], at " + __file__
    assert str(errors[0]).startswith(text)
    assert "    y = x * 1.0  # trap's operand" in str(errors[0])


@pytest.mark.parametrize("jit", JITS)
def test_the_backward_pass_of_a_watched_gradient_is_distinguished(jit: Jit) -> None:
    def f(x, w):
        y = x * w  # overflows backwards
        return jnp.sum(y * w)

    (error,) = errors_of(lambda: jit(hcb.watch_nonfinite(jax.grad(f)))(X * 1e-30, jnp.float32(1e30)))
    assert found([error]) == [("mul", line_of(__file__, "overflows backwards"), 0, 4, (), True)]
    assert not error.cotangent
    assert str(error).startswith(
        "backward pass, mul: 0 NaN and 4 infinite values in float32[4], at " + __file__
    )


@pytest.mark.parametrize("jit", JITS)
def test_iterations_in_the_backward_pass_match_the_forward_pass(jit: Jit) -> None:
    def f(x):
        def step(c, y):
            z = y * 2  # cotangent in scan
            return c + jnp.sqrt(z), None

        return lax.scan(step, 0.0, x)[0]

    x = jnp.array([1.0, 0.0, 3.0])
    errors = errors_of(lambda: jit(jax.grad(hcb.watch_nonfinite(f)))(x))
    line = line_of(__file__, "cotangent in scan")
    assert found(errors) == [("mul", line, 0, 1, (1,), True), ("input x", None, 0, 1, (), True)]


@pytest.mark.parametrize("jit", JITS)
def test_the_rules_of_custom_vjp_are_looked_into(jit: Jit) -> None:
    def grad_of(f: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: jit(jax.grad(hcb.watch_nonfinite(lambda x: jnp.sum(f(x)))))(X)

    first, *_ = errors_of(grad_of(bad_backward))
    # The lines are those of the call: JAX attributes every operation in a rule of custom_vjp to it.
    assert (first.primitive, first.inf_count, first.backward, first.cotangent) == ("div", 4, True, False)
    first, *_ = errors_of(grad_of(bad_forward))
    assert (first.primitive, first.nan_count, first.backward) == ("log", 2, False)


@pytest.mark.parametrize("jit", JITS)
def test_the_rule_of_custom_jvp_is_reported_as_one_operation(jit: Jit) -> None:
    def f(x):
        y = bad_jvp(x)  # custom_jvp
        return jnp.sum(y)

    (error,) = errors_of(lambda: jit(jax.grad(hcb.watch_nonfinite(f)))(X))
    assert found([error]) == [("custom_jvp_call", line_of(__file__, "custom_jvp"), 4, 0, (), False)]


@pytest.mark.parametrize("jit", JITS)
def test_in_a_checkpoint_the_forward_pass_reports_once(jit: Jit) -> None:
    def f(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.log(x - 1.5)))(x))

    errors = errors_of(lambda: jit(jax.grad(hcb.watch_nonfinite(f)))(X))
    assert [e.primitive for e in errors if not e.backward] == ["log"]


@pytest.mark.parametrize("jit", COMPILED)
def test_each_device_reports_its_cotangents(jit: Jit) -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def per_device(x):
        y = x * 1.0  # on devices
        return lax.psum(jnp.sum(jnp.sqrt(y)), "i")

    f = jax.shard_map(per_device, mesh=mesh, in_specs=P("i"), out_specs=P())
    errors = errors_of(lambda: jit(jax.grad(hcb.watch_nonfinite(f)))(X.at[2].set(0)))
    (error,) = [e for e in errors if e.primitive == "mul"]
    assert (error.device, error.inf_count, error.backward) == ("cpu:2", 1, True)


@pytest.mark.parametrize("jit", JITS)
def test_under_vmap_one_cotangent_report_covers_the_batch(jit: Jit) -> None:
    batch = jnp.zeros((3, 2))
    errors = errors_of(lambda: jit(jax.vmap(jax.grad(hcb.watch_nonfinite(trapped))))(batch))
    assert [(e.primitive, e.nan_count, e.shape) for e in errors] == [("mul", 6, (2,)), ("input x", 6, (2,))]


@pytest.mark.slow
def test_second_derivatives_are_watched() -> None:
    f = hcb.watch_nonfinite(lambda x: x**1.5)
    errors = errors_of(lambda: jax.grad(jax.grad(f))(0.0))
    assert errors
    assert all(e.backward for e in errors)
    assert not errors_of(lambda: jax.hessian(f)(1.0))
