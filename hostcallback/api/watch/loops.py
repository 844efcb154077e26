"""Finds the first iteration of a loop that makes a value that is not finite: the loop compiled, with a test in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lowering.evaluator import Place, where_it_goes_on
from hostcallback.lowering.inputs import any_not_finite, is_inexact
from hostcallback.lowering.silence import Silent

Flags = Callable[[Any, Sequence[Any], Place], tuple[list[Any], Any]]
"""Evaluates the body of a loop under a trace; returns its results, and whether a value in it is not finite."""


def of_results(jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Any]:
    return Silent().evaluate(jaxpr, values, Place())[0], jnp.zeros((), bool)


class Search:
    """Notes the first iterations that make a value that is not finite, and one that is NaN."""

    def __init__(self, flags: Flags, place: Place) -> None:
        self._flags, self._place = flags, place

    def step(self, jaxpr: Any, i: Any, firsts: Any, values: Any, carry: Any) -> tuple[list[Any], Any]:
        outs, inside = self._flags(jaxpr, values, self._place)
        new = inside | any_not_finite(outs[len(carry) :])
        for before, after in zip(carry, outs, strict=False):
            new |= any_not_finite([after]) & ~any_not_finite([before])
        nan = [jnp.any(jnp.isnan(out)) for out in outs if is_inexact(out)]
        held = jnp.stack([new, jnp.any(jnp.stack(nan)) if nan else jnp.zeros((), bool)])
        return outs, jnp.where((firsts < 0) & held, i, firsts)


NO_ITERATION = np.full(2, -1, np.int32)


def scan_until(equation: Any, search: Search) -> Callable[..., Any]:
    params = equation.params

    def run(most: Any, operands: Sequence[Any]) -> Any:
        consts, init, xs = compat.scan_groups(params, operands)

        def step(state: Any, x: Any) -> Any:
            i, firsts, carry = state

            def goes(firsts: Any, carry: Any, x: Any) -> Any:
                outs, firsts = search.step(params["jaxpr"], i, firsts, [*consts, *carry, *x], carry)
                return (firsts, outs[: len(init)]), outs[len(init) :]

            shapes = jax.eval_shape(goes, firsts, carry, x)[1]

            def stays(firsts: Any, carry: Any, x: Any) -> Any:
                return (firsts, carry), [zeros(shape) for shape in shapes]

            (firsts, carry), ys = jax.lax.cond(i < most, goes, stays, firsts, carry, x)
            return (i + 1, firsts, carry), ys

        start = (jnp.int32(0), jnp.asarray(NO_ITERATION), init)
        (_, firsts, carry), ys = jax.lax.scan(
            step, start, xs, length=params["length"], reverse=params["reverse"]
        )
        return [*carry, *ys], firsts, carry

    return run


def while_until(equation: Any, search: Search) -> Callable[..., Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def run(most: Any, operands: Sequence[Any]) -> Any:
        def predicate(carry: Any) -> Any:
            return compat.eval_jaxpr(params["cond_jaxpr"], *operands[:first], *carry)[0]

        def goes_on(state: Any) -> Any:
            i, _, carry = state
            return (i < most) & jnp.any(predicate(carry))

        def step(state: Any) -> Any:
            i, firsts, carry = state
            outs, firsts = search.step(
                params["body_jaxpr"], i, firsts, [*operands[first:second], *carry], carry
            )
            return i + 1, firsts, where_it_goes_on(predicate(carry), outs, carry)

        start = (jnp.int32(0), jnp.asarray(NO_ITERATION), list(operands[second:]))
        _, firsts, carry = jax.lax.while_loop(goes_on, step, start)
        return carry, firsts, carry

    return run


def zeros(shape: Any) -> Any:
    if not jnp.issubdtype(shape.dtype, jax.dtypes.extended):
        return jnp.zeros(shape.shape, shape.dtype)
    return compat.zero_keys(shape)
