"""Tests compiled into programs: of operations, of what leaves marked equations, and of each iteration of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import Literal
from hostcallback.lowering.evaluator import (
    Evaluator,
    Place,
    Records,
    Silent,
    loop_of,
    silently,
    structure_of,
    where_it_goes_on,
)
from hostcallback.lowering.inputs import any_not_finite, is_inexact
from hostcallback.tracing import source_line

FAILED = "failed"

Chosen = Callable[[Any, Place], bool]
"""Whether an equation at a place is watched."""


class Tests(Evaluator):
    """Evaluates a program under a trace; its record `FAILED` says whether a test failed."""

    def __init__(self, chosen: Chosen, *, every: bool, silent: bool = False) -> None:
        """Makes the evaluator.

        Args:
            chosen: the equations that are meant.
            every: whether to test each of their results, where their operands are finite; otherwise only those that
                other equations, or what follows the program, use.
            silent: whether this is a second run, without effects.
        """
        self._chosen: Chosen = lambda equation, place: (
            not source_line.is_own(str(equation.source_info.name_stack)) and chosen(equation, place)
        )
        self._every = every
        self._silent = silent
        self._leaving: dict[int, tuple[Any, set[Any]]] = {}
        self._flags: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self.callbacks: list[str] = []

    def failed(self, jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Any]:
        """Evaluates a program; returns its results, and whether a test failed: a bool scalar."""
        outs, records = self.evaluate(jaxpr, values, place)
        return outs, jnp.any(records[FAILED]) if FAILED in records else jnp.zeros((), bool)

    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        structure = structure_of(equation)
        if structure is None or structure.kind == "other":
            return False
        if not self._every and self._chosen(equation, place):
            return False  # its results are tested
        inside = place.inside(equation)
        return any(self._has_chosen(program, inside) for program, _ in structure.programs)

    def _has_chosen(self, program: Any, place: Place) -> bool:
        for equation in compat.open_jaxpr(program)[0].eqns:
            if any(is_inexact(v.aval) for v in equation.outvars) and self._chosen(equation, place):
                return True
            structure = structure_of(equation)
            if structure is not None and any(
                self._has_chosen(inner, place.inside(equation)) for inner, _ in structure.programs
            ):
                return True
        return False

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        return silently(equation, values, self.callbacks) if self._silent else super().bind(equation, values)

    def made(
        self,
        jaxpr: Any,
        equation: Any,
        values: Sequence[Any],
        outs: Sequence[Any],
        place: Place,
        records: Records,
    ) -> None:
        results = [out for out in outs if is_inexact(out)]
        if not results or not self._chosen(equation, place):
            return
        if self._every:
            # What a NaN spreads to is no origin, and a mask of infinities is meant.
            held = self._flag(records, results)
            for value in values:
                if is_inexact(value):
                    held &= ~self._flag(records, [jnp.asarray(value)])
        else:
            leaving = self._leaving_of(jaxpr, place)
            left = [
                out for v, out in zip(equation.outvars, outs, strict=True) if v in leaving and is_inexact(out)
            ]
            if not left:
                return
            held = any_not_finite(left)
        records[FAILED] = jnp.any(records[FAILED]) | held if FAILED in records else held

    def of_iteration(self, records: Records) -> Records:
        return {FAILED: jnp.any(records[FAILED])} if FAILED in records else {}

    def _flag(self, records: Records, values: Sequence[Any]) -> Any:
        # By the records, because a value may be used in several traces. The entry keeps both alive, and with them ids.
        value = values[0]
        key = (id(records), id(value))
        if len(values) > 1:
            for each in values:
                self._flag(records, [each])
            return any_not_finite(values)
        if key not in self._flags:
            self._flags[key] = (records, value, any_not_finite(values))
        return self._flags[key][2]

    def _leaving_of(self, jaxpr: Any, place: Place) -> set[Any]:
        if id(jaxpr) not in self._leaving:
            found = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
            for equation in jaxpr.eqns:
                if not self._chosen(equation, place):
                    found |= {v for v in equation.invars if not isinstance(v, Literal)}
            self._leaving[id(jaxpr)] = (jaxpr, found)
        return self._leaving[id(jaxpr)][1]


def marked(mark: str) -> Chosen:
    """The equations that a mark is on."""

    def chosen(equation: Any, place: Place) -> bool:
        stacks = (str(e.source_info.name_stack) for e in (*place.equations, equation))
        return not mark or any(mark in source_line.marks_in(stack) for stack in stacks)

    return chosen


# ---- Loops -----------------------------------------------------------------------------------------------------------

Flags = Callable[[Any, Sequence[Any], Place], tuple[list[Any], Any]]
"""Evaluates the body of a loop under a trace; returns its results, and whether a value in it is not finite."""


def only_results(jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Any]:
    """The `Flags` that test only the carry of each iteration, which every search does."""
    return Silent().evaluate(jaxpr, values, place)[0], jnp.zeros((), bool)


def search(equation: Any, place: Place, flags: Flags) -> Callable[..., tuple[list[Any], Any, list[Any]]]:
    """Returns a function that runs a loop and finds its first iterations that make a value that is not finite.

    Args:
        equation: a scan or a while loop.
        place: of its body.
        flags: how the body is tested.

    Returns:
        A function of the most iterations to run, int32, and of the operands. It returns the results of the loop, int32
        [2] with the first iteration that makes a value that is not finite and the first that makes a NaN (-1 for none),
        and the carry.
    """

    def run(most: Any, operands: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
        loop = loop_of(equation, operands)
        count = len(loop.init)

        def holds(carry: Sequence[Any]) -> Any:
            return compat.eval_jaxpr(loop.condition, *loop.condition_consts, *carry)[0]

        def goes_on(state: Any) -> Any:
            i, _, carry, _ = state
            return (i < most) & (jnp.any(holds(carry)) if loop.length is None else i < loop.length)

        def step(state: Any) -> Any:
            i, firsts, carry, ys = state
            number = loop.number(i)
            x = [jax.lax.dynamic_index_in_dim(each, number, keepdims=False) for each in loop.xs]
            outs, inside = flags(loop.body, [*loop.consts, *carry, *x], place)
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


def _tests_of(carry: Sequence[Any], outs: Sequence[Any], inside: Any) -> Any:
    # Whether an iteration makes a value that is not finite, and whether one of its results has a NaN: bool [2].
    new = inside | any_not_finite(outs[len(carry) :])
    for before, after in zip(carry, outs, strict=False):
        new |= any_not_finite([after]) & ~any_not_finite([before])
    nan = [jnp.any(jnp.isnan(out)) for out in outs if is_inexact(out)]
    return jnp.stack([new, jnp.any(jnp.stack(nan)) if nan else jnp.zeros((), bool)])


def zeros(aval: Any) -> Any:
    """An array of a type, of zeros."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.zeros(aval.shape, aval.dtype)
    return compat.zero_keys(aval)
