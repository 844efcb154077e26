"""Tests compiled into programs: of operations, of what leaves marked equations, and of each iteration of a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lowering.equations import (
    OUTERMOST,
    Position,
    equations_in,
    loop_of,
    structure_of,
    variables,
)
from hostcallback.lowering.evaluator import Evaluator, Records, Silent, Tester, where_it_goes_on
from hostcallback.lowering.inputs import any_not_finite, is_inexact
from hostcallback.tracing import source_line

Chosen = Callable[[compat.JaxprEqn, Position], bool]
"""Whether an equation of the program at a position is watched."""


class Tests(Tester):
    """Tests the results of operations for values that are not finite."""

    def __init__(
        self, *, left: Chosen | None = None, every: Chosen | None = None, evaluator: Evaluator | None = None
    ) -> None:
        """Makes the evaluator.

        Args:
            left: the equations of which those results are tested that other equations, or what follows the program,
                use; None for no such test. Equations inside of one are such equations too.
            every: the equations of which each result is tested, where their operands are finite; None for none.
            evaluator: evaluates operations; None for one that has their effects.
        """
        self._left = _of_user(left)
        self._every = _of_user(every)
        self._evaluator = evaluator or Evaluator()
        self._outermost = OUTERMOST
        self._leaving: set[compat.Var] = set()
        self._flags: dict[tuple[int, int], tuple[Records, Any, Any]] = {}

    def failed(
        self, jaxpr: compat.AnyJaxpr, values: Sequence[jax.Array], position: Position = OUTERMOST
    ) -> tuple[list[Any], Any]:
        self._outermost = position
        return super().failed(jaxpr, values, position)

    def enters(self, equation: compat.JaxprEqn, position: Position) -> bool:
        is_left = self._left(equation, position)  # then its results are tested
        return any(
            any(is_inexact(v.aval) for v in inner.outvars)
            and (self._every(inner, there) or (not is_left and self._left(inner, there)))
            for program, _ in structure_of(equation).programs
            for inner, there in equations_in(program, position.inside(equation))
        )

    def bind(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        return self._evaluator.bind(equation, values)

    def given(
        self, jaxpr: compat.Jaxpr, values: Sequence[jax.Array], position: Position, records: Records
    ) -> None:
        *around, last = position.equations or (None,)
        if (
            last is not None
            and position.key != self._outermost.key
            and self._left(last, Position((*around,)))
        ):
            return  # of this program only what leaves the equation around it
        self._leaving.update(variables(jaxpr.outvars))
        for equation in jaxpr.eqns:
            if not self._left(equation, position):
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
            (out, variable in self._leaving)
            for variable, out in zip(equation.outvars, outs, strict=True)
            if is_inexact(out)
        ]
        if results and self._every(equation, position):
            held = functools.reduce(jnp.logical_or, (self._flag(records, out) for out, _ in results))
            # What a NaN spreads to is no origin, and a mask of infinities is meant.
            for value in values:
                if is_inexact(value):
                    held &= ~self._flag(records, jnp.asarray(value))
            self.fail_if(records, held)
        leaving = [out for out, is_leaving in results if is_leaving]
        if leaving and self._left(equation, position):
            self.fail_if(records, any_not_finite(leaving))

    def _flag(self, records: Records, value: jax.Array) -> Any:
        # By the records, because a value may be used in several traces. The entry keeps both alive, and with them ids.
        key = (id(records), id(value))
        if key not in self._flags:
            self._flags[key] = (records, value, any_not_finite([value]))
        return self._flags[key][2]


def _of_user(chosen: Chosen | None) -> Chosen:
    # None stands for no equation; equations of our own are not meant either.
    return lambda equation, position: (
        chosen is not None
        and not source_line.is_own(str(equation.source_info.name_stack))
        and chosen(equation, position)
    )


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
        [3] with the first iteration of which a result becomes one that is not finite, the first of which a result has a
        NaN, and the first in which a test of `flags` fails (-1 for none), and the carry.
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
        start = (jnp.int32(0), jnp.full(3, -1, np.int32), loop.init, ys)
        _, firsts, carry, ys = jax.lax.while_loop(goes_on, step, start)
        return [*carry, *ys], firsts, carry

    return run


def _tests_of(carry: Sequence[jax.Array], outs: Sequence[jax.Array], inside: jax.Array) -> jax.Array:
    # Whether a result becomes one that is not finite, whether one has a NaN, and whether a test failed: bool [3].
    new = any_not_finite(outs[len(carry) :])
    for before, after in zip(carry, outs, strict=False):
        new |= any_not_finite([after]) & ~any_not_finite([before])
    nan = [jnp.any(jnp.isnan(out)) for out in outs if is_inexact(out)]
    return jnp.stack([new, jnp.any(jnp.stack(nan)) if nan else jnp.zeros((), bool), inside])


def zeros(aval: compat.Aval) -> Any:
    """An array of a type, of zeros."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.zeros(aval.shape, aval.dtype)
    return compat.zero_keys(aval)
