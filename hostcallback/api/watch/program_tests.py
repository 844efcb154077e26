"""Tests compiled into programs: of operations, of what leaves marked equations, and of each iteration of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.lowering.evaluator import Evaluator, Place, Records, structure_of, where_it_goes_on
from hostcallback.lowering.inputs import any_not_finite, is_inexact
from hostcallback.lowering.silence import Silent, silently
from hostcallback.tracing import scopes

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
            not scopes.is_own(str(equation.source_info.name_stack)) and chosen(equation, place)
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
        return not mark or any(mark in scopes.marks_in(stack) for stack in stacks)

    return chosen


Flags = Callable[[Any, Sequence[Any], Place], tuple[list[Any], Any]]
"""Evaluates the body of a loop under a trace; returns its results, and whether a value in it is not finite."""


def iteration_results(jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Any]:
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
