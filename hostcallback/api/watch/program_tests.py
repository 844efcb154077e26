"""Tests compiled into programs: of operations, of what leaves marked equations, and of each iteration of a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lowering.equations import Position, equations_in, loop_of, structure_of, variables
from hostcallback.lowering.evaluator import Evaluator, Records, Silent, Tester, where_it_goes_on
from hostcallback.lowering.inputs import any_not_finite, is_inexact
from hostcallback.tracing import source_line

Chosen = Callable[[compat.JaxprEqn, Position], bool]
"""Whether an equation of the program at a position is watched."""


class Tests(Tester):
    """Tests the results of operations for values that are not finite."""

    def __init__(self, chosen: Chosen, *, every: bool, evaluator: Evaluator | None = None) -> None:
        """Makes the evaluator.

        Args:
            chosen: the equations that are meant.
            every: whether to test each of their results, where their operands are finite; otherwise only those that
                other equations, or what follows the program, use.
            evaluator: evaluates operations; None for one that has their effects.
        """
        self._chosen: Chosen = lambda equation, position: (
            not source_line.is_own(str(equation.source_info.name_stack)) and chosen(equation, position)
        )
        self._every = every
        self._evaluator = evaluator or Evaluator()
        self._leaving: set[compat.Var] = set()
        self._flags: dict[tuple[int, int], tuple[Records, Any, Any]] = {}

    def enters(self, equation: compat.JaxprEqn, position: Position) -> bool:
        if not self._every and self._chosen(equation, position):
            return False  # its results are tested
        return any(
            any(is_inexact(v.aval) for v in inner.outvars) and self._chosen(inner, there)
            for program, _ in structure_of(equation).programs
            for inner, there in equations_in(program, position.inside(equation))
        )

    def bind(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        return self._evaluator.bind(equation, values)

    def given(
        self, jaxpr: compat.Jaxpr, values: Sequence[jax.Array], position: Position, records: Records
    ) -> None:
        if not self._every:
            self._leaving.update(variables(jaxpr.outvars))
            for equation in jaxpr.eqns:
                if not self._chosen(equation, position):
                    self._leaving.update(variables(equation.invars))

    def made(
        self,
        equation: compat.JaxprEqn,
        values: list[jax.Array],
        outs: Sequence[jax.Array],
        position: Position,
        records: Records,
    ) -> None:
        results = [
            out
            for variable, out in zip(equation.outvars, outs, strict=True)
            if is_inexact(out) and (self._every or variable in self._leaving)
        ]
        if not results or not self._chosen(equation, position):
            return
        if self._every:
            held = functools.reduce(jnp.logical_or, (self._flag(records, out) for out in results))
            # What a NaN spreads to is no origin, and a mask of infinities is meant.
            for value in values:
                if is_inexact(value):
                    held &= ~self._flag(records, jnp.asarray(value))
        else:
            held = any_not_finite(results)
        self.fail_if(records, held)

    def _flag(self, records: Records, value: jax.Array) -> Any:
        # By the records, because a value may be used in several traces. The entry keeps both alive, and with them ids.
        key = (id(records), id(value))
        if key not in self._flags:
            self._flags[key] = (records, value, any_not_finite([value]))
        return self._flags[key][2]


# ---- Loops -----------------------------------------------------------------------------------------------------------

Flags = Callable[[compat.AnyJaxpr, Sequence[Any], Position], tuple[list[Any], Any]]
"""Evaluates the body of a loop under a trace; returns its results, and whether a value in it is not finite."""


def only_results(
    jaxpr: compat.AnyJaxpr, values: Sequence[jax.Array], position: Position
) -> tuple[list[Any], Any]:
    """The `Flags` that test only the carry of each iteration, which every search does."""
    return Silent().evaluate(jaxpr, values, position)[0], jnp.zeros((), bool)


def search(
    equation: compat.JaxprEqn, position: Position, flags: Flags
) -> Callable[..., tuple[list[Any], Any, list[Any]]]:
    """Returns a function that runs a loop and finds its first iterations that make a value that is not finite.

    Args:
        equation: a scan or a while loop.
        position: of its body.
        flags: how the body is tested.

    Returns:
        A function of the most iterations to run, int32, and of the operands. It returns the results of the loop, int32
        [2] with the first iteration that makes a value that is not finite and the first that makes a NaN (-1 for none),
        and the carry.
    """

    def run(most: Any, operands: Sequence[jax.Array]) -> tuple[list[Any], Any, list[Any]]:
        loop = loop_of(equation, operands)
        count = len(loop.init)

        def holds(carry: Sequence[jax.Array]) -> Any:
            return Silent().evaluate(loop.condition, [*loop.condition_consts, *carry])[0][0]

        def goes_on(state: Any) -> Any:
            i, _, carry, _ = state
            return (i < most) & (jnp.any(holds(carry)) if loop.length is None else i < loop.length)

        def step(state: Any) -> Any:
            i, firsts, carry, ys = state
            number = loop.number(i)
            x = [jax.lax.dynamic_index_in_dim(each, number, keepdims=False) for each in loop.xs]
            outs, inside = flags(loop.body, [*loop.consts, *carry, *x], position)
            firsts = jnp.where((firsts < 0) & _tests_of(carry, outs, inside), i, firsts)
            after = outs[:count] if loop.length is not None else where_it_goes_on(holds(carry), outs, carry)
            ys = [
                jax.lax.dynamic_update_index_in_dim(all_y, y, number, 0)
                for all_y, y in zip(ys, outs[count:], strict=True)
            ]
            return i + 1, firsts, after, ys

        ys = [zeros(variable.aval) for variable in equation.outvars[count:]]
        start = (jnp.int32(0), jnp.full(2, -1, np.int32), loop.init, ys)
        _, firsts, carry, ys = jax.lax.while_loop(goes_on, step, start)
        return [*carry, *ys], firsts, carry

    return run


def _tests_of(carry: Sequence[jax.Array], outs: Sequence[jax.Array], inside: jax.Array) -> jax.Array:
    # Whether an iteration makes a value that is not finite, and whether one of its results has a NaN: bool [2].
    new = inside | any_not_finite(outs[len(carry) :])
    for before, after in zip(carry, outs, strict=False):
        new |= any_not_finite([after]) & ~any_not_finite([before])
    nan = [jnp.any(jnp.isnan(out)) for out in outs if is_inexact(out)]
    return jnp.stack([new, jnp.any(jnp.stack(nan)) if nan else jnp.zeros((), bool)])


def zeros(aval: compat.Aval) -> Any:
    """An array of a type, of zeros."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.zeros(aval.shape, aval.dtype)
    return compat.zero_keys(aval)
