"""Evaluates the equations of a program that runs a second time, without the effects that it had the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.lowering.evaluator import Evaluator, Place, structure_of
from hostcallback.primitives.call import call_p
from hostcallback.primitives.tap import tap_p
from hostcallback.tracing.source_line import first_user_line

_DEBUGGING = {"debug_callback", "debug_print"}
_CALLS = {"io_callback", call_p.name}


class NotRepeatableError(Exception):
    """A program calls a host function whose results it uses and which a second run must not call again."""


def silently(equation: Any, values: Sequence[Any], callbacks: list[str]) -> list[Any]:
    """Evaluates an equation; taps, checks, prints and callbacks without results do nothing.

    Adds the name and line of a `pure_callback`, which is called, to `callbacks`.

    Raises:
        NotRepeatableError: the equation uses the results of a callback that may have side effects.
    """
    name = equation.primitive.name
    if equation.primitive is tap_p:
        return list(values)
    if name in _DEBUGGING or (name in _CALLS and not equation.outvars):
        return []
    if name in _CALLS or name == "pure_callback":
        line = first_user_line(compat.equation_frames(equation))
        call = f"{name} at {line}" if line else name
        if name in _CALLS:
            raise NotRepeatableError(call)
        callbacks.append(call)
    return compat.bind_equation(equation, values)


class Silent(Evaluator):
    """Evaluates a program under a trace without its effects; see `silently`.

    Attributes:
        callbacks: names and lines of the `pure_callback`s, which are called.
    """

    def __init__(self) -> None:
        """Makes the evaluator."""
        self.callbacks: list[str] = []

    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        structure = structure_of(equation)
        return structure is not None and structure.kind != "other" and _is_loud(equation)

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        return silently(equation, values, self.callbacks)


def _is_loud(equation: Any) -> bool:
    name = equation.primitive.name
    if equation.primitive is tap_p or name in _DEBUGGING or name in _CALLS or name == "pure_callback":
        return True
    structure = structure_of(equation)
    programs = structure.programs if structure else ()
    return any(_is_loud(inner) for program, _ in programs for inner in compat.open_jaxpr(program)[0].eqns)
