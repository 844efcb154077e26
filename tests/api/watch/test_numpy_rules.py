"""The walk's own rules for common operations have the results of JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from hostcallback.api.watch.values import evaluated

X = np.array([[0.3, -1.5, 2.0], [0.7, 0.1, -0.4]], np.float32)
COUNTS = np.array([[1, 0, 5], [2, 2, -3]], np.int32)

OPERATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "arithmetic": (
        lambda x, n: x + x * 2 - x / 3 + n,
        lambda x, n: lax.rem(x, jnp.float32(0.4)),
        lambda x, n: -x,
    ),
    "functions": (
        lambda x, n: (
            jnp.exp(x) + jnp.tanh(x) + lax.logistic(x) + lax.rsqrt(abs(x)) + lax.erf(x) + jnp.sign(x)
        ),
        lambda x, n: x**3,
        lambda x, n: jnp.clip(x, -0.2, 0.5),
    ),
    "comparisons": (lambda x, n: (x > 0.2) & ~(n == 2) | (n != 0) ^ (x <= n),),
    "choices": (lambda x, n: lax.select_n(x > 0, x, 2 * x), lambda x, n: jnp.where(n > 1, n, 2 * n)),
    "reductions": (
        lambda x, n: x.sum(0) + x.max() + x.prod(1)[0] + n.min(),
        lambda x, n: (x > 0).any(0) ^ (n > 0).all(0),
    ),
    "shapes": (
        lambda x, n: jnp.concatenate([x.T, x.reshape(3, 2)[::-1], x[:, :2][::1][:, ::-1]], 0),
        lambda x, n: x[None, 1:, ::2] + lax.iota(np.float32, 2) + jnp.zeros((3, 1, 2)),
    ),
    "conversions": (lambda x, n: n.astype(np.float32) + x.astype(jnp.bfloat16),),
    "products": (
        lambda x, n: x @ x.T,
        lambda x, n: jnp.einsum("bi,bj->bij", x, x),
        lambda x, n: lax.dot_general(x, x, (((0,), (0,)), ((), ()))),
    ),
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_each_rule_has_the_result_of_the_operation(kind: str) -> None:
    for function in OPERATIONS[kind]:
        jaxpr = jax.make_jaxpr(function)(X, COUNTS)
        values: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, (X, COUNTS), strict=True))
        values |= zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        for equation in jaxpr.eqns:
            given = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                (made,) = jaxpr_as_fun(equation.params["jaxpr"])(*given)
            else:
                made = evaluated(equation, given)
                assert made is not None, equation
                expected = equation.primitive.bind(*given, **equation.params)
                assert made.dtype == expected.dtype
                np.testing.assert_allclose(
                    np.asarray(made, np.float64),
                    np.asarray(expected, np.float64),
                    rtol=1e-2 if made.dtype.itemsize == 2 else 1e-5,
                )
            values[equation.outvars[0]] = made
