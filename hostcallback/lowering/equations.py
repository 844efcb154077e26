"""Equations of programs: the programs that they hold, their positions, where they are from in the user's source.

`structure_of` is the one table of JAX's primitives that hold programs; whatever else holds programs (custom_root,
pallas_call, ...) is one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from hostcallback.tracing import source_line
from hostcallback.tracing.source_line import SourceLine, called_name, first_user_line

T = TypeVar("T")

# ---- Equations that hold programs ------------------------------------------------------------------------------------

CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", *compat.INLINE_CALLS}
REMATS = {"remat2", "remat", "checkpoint"}
_OPEN = ("call", "remat", "cond", "scan", "while", "shard_map")


class Structure(NamedTuple):
    """The programs that an equation holds.

    Attributes:
        kind: "call", "remat", "cond", "scan", "while" or "shard_map"; "other" if they cannot be evaluated one equation
            at a time; "" if it holds none.
        programs: each with the operands of the equation that are its inputs, in order; empty where there is no such
            order. Of a while loop the body only.
    """

    kind: str
    programs: Sequence[tuple[AnyJaxpr, list[Atom]]]

    @property
    def is_open(self) -> bool:
        """Whether its programs can be evaluated one equation at a time."""
        return self.kind in _OPEN


def structure_of(equation: JaxprEqn) -> Structure:
    """The programs that an equation holds."""
    params, operands, name = equation.params, list(equation.invars), equation.primitive.name
    if name == "while":
        return Structure("while", [(params["body_jaxpr"], operands[params["cond_nconsts"] :])])
    if name == "cond":
        return Structure("cond", [(branch, operands[1:]) for branch in params["branches"]])
    found = [params[key] for key in ("jaxpr", "call_jaxpr") if hasattr(params.get(key), "eqns")]
    kind = "call" if name in CALLS else "remat" if name in REMATS else name
    if found and kind in _OPEN:
        return Structure(kind, [(found[0], operands)])
    if not found:
        values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else [p])]
        found = [value for value in values if hasattr(value, "eqns")]
    return Structure("other" if found else "", [(jaxpr, []) for jaxpr in found])


class Loop(NamedTuple):
    """A scan or a while loop: what an iteration takes.

    Attributes:
        body: the program of an iteration: of the constants, the carry, and the elements of `xs`.
        consts: the constants of the body.
        init: the first carry.
        xs: what a scan is over.
        length: the number of iterations; None of a while loop.
        reverse: whether a scan begins with the last element.
        condition: the program that says whether a while loop goes on, of its constants and the carry; None of a scan.
        condition_consts: its constants.
        paced: of the loops of a loop with a bar, see `source_line.paced`.
    """

    body: AnyJaxpr
    consts: list[Any]
    init: list[Any]
    xs: list[Any]
    length: int | None
    reverse: bool
    condition: Any
    condition_consts: list[Any]
    paced: str | None = None

    def number(self, step: Any) -> Any:
        """The number of the iteration that runs after `step` others."""
        return self.length - 1 - step if self.length is not None and self.reverse else step

    def iteration(self, step: Any, carry: Sequence[jax.Array]) -> tuple[Any, ...]:
        """That number as the user counts it, which two nested loops of ours have once: the outer one has none."""
        if self.paced is None:
            return (self.number(step),)
        if not self.paced:
            return ()
        counted = carry[int(self.paced)]
        return (
            (step,) if counted.ndim else (counted.astype(np.int32),)
        )  # under vmap each element has a number


def loop_of(equation: JaxprEqn, operands: Sequence[Any]) -> Loop:
    """Splits a scan or while loop with these operands into its parts."""
    params = equation.params
    if equation.primitive.name == "scan":
        consts, init, xs = compat.scan_groups(params, operands)
        return Loop(params["jaxpr"], consts, init, xs, params["length"], params["reverse"], None, [])
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, consts, init = list(operands[:first]), list(operands[first:second]), list(operands[second:])
    paced = source_line.paced(str(equation.source_info.name_stack))
    return Loop(
        params["body_jaxpr"], consts, init, [], None, False, params["cond_jaxpr"], of_condition, paced
    )


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables (not literals) among operands or results."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


# ---- Positions in programs, and places in the user's source ----------------------------------------------------------


class Place(NamedTuple):
    """Where in the user's source an equation is from.

    Attributes:
        line: the user's line; None if JAX does not know it.
        scope: the named scopes around it, separated by `/`.
        backward: whether it is part of a backward pass.
    """

    line: SourceLine | None
    scope: str
    backward: bool


@dataclass(frozen=True)
class Position:
    """The position of a program.

    Attributes:
        equations: the equations around it, outermost first.
        iterations: the number of the current iteration of each loop around it, outermost first: int32 scalars; only
            for evaluators that count them.
    """

    equations: tuple[JaxprEqn, ...] = ()
    iterations: tuple[Any, ...] = ()

    def inside(self, equation: JaxprEqn, *iterations: Any) -> Position:
        """Returns the position of a program inside an equation of this program."""
        return Position((*self.equations, equation), (*self.iterations, *iterations))

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the position, for as long as its program is kept."""
        return tuple(map(id, self.equations))

    def place_of(self, equation: JaxprEqn) -> Place:
        """Where in the user's source an equation of the program is from."""
        stacks = self._stacks(equation)
        # The operations within a function of JAX are reported at the user's line that calls the function.
        around = (equation, *reversed(self.equations))
        lines = (first_user_line(compat.equation_frames(each)) for each in around)
        return Place(
            next((line for line in lines if line is not None), None),
            "/".join(self._scopes(equation, stacks)),
            any(map(source_line.is_backward, stacks)) and not any(map(source_line.is_recomputed, stacks)),
        )

    def caller_of(self, equation: JaxprEqn) -> str:
        """The function whose call on the user's line made an equation of the program, or its derivative did.

        As a phrase: "sqrt", "sqrt or its derivative", "the derivative of sqrt". Empty if it is not known, or has the
        equation's name.
        """
        origins = map(compat.equation_origin, (equation, *reversed(self.equations)))
        innermost = next(filter(None, origins), ())
        *_, name = (called_name(*innermost[0]) if innermost else ()) or ("",)
        if name in ("", equation.primitive.name):
            return ""
        stacks = self._stacks(equation)
        if any(map(source_line.is_backward, stacks)):
            return f"the derivative of {name}"
        return f"{name} or its derivative" if any("jvp(" in stack for stack in stacks) else name

    def has_mark(self, mark: str, equation: JaxprEqn) -> bool:
        """Whether the mark of an X-ray is on an equation of the program, or on one around it; "" is on all."""
        return not mark or any(mark in source_line.marks_in(stack) for stack in self._stacks(equation))

    def _scopes(self, equation: JaxprEqn, stacks: Sequence[str]) -> Iterator[str]:
        is_backward = False
        for each, stack in zip((*self.equations, equation), stacks, strict=True):
            yield from source_line.scope_of(stack, is_twice=is_backward and each.primitive.name in REMATS)
            is_backward |= source_line.is_backward(stack)

    def _stacks(self, equation: JaxprEqn) -> list[str]:
        return [str(each.source_info.name_stack) for each in (*self.equations, equation)]


OUTERMOST = Position()


def equations_in(
    jaxpr: AnyJaxpr, position: Position = OUTERMOST, instead: Mapping[tuple[int, ...], AnyJaxpr] = {}
) -> Iterator[tuple[JaxprEqn, Position]]:
    """The equations of a program and of those in it, each with its position.

    `instead` has programs by the keys of the positions at which they are taken instead.
    """
    for equation in compat.open_jaxpr(jaxpr)[0].eqns:
        yield equation, position
        there = position.inside(equation)
        for inner, _ in structure_of(equation).programs:
            yield from equations_in(instead.get(there.key, inner) if instead else inner, there, instead)


# ---- Interpretation --------------------------------------------------------------------------------------------------


def interpret(
    jaxpr: AnyJaxpr,
    values: Sequence[T],
    step: Callable[[JaxprEqn, list[T]], Sequence[T]],
    literal: Callable[[Any], T] = lambda value: value,
) -> list[T]:
    """Interprets a program, and keeps values no longer than they are used; returns its results.

    Args:
        jaxpr: the program, closed or without constants.
        values: its inputs.
        step: returns the results of an equation for its operands.
        literal: makes a value of a literal or of a constant.
    """
    program, consts = compat.open_jaxpr(jaxpr)
    given = (*map(literal, consts), *values)
    env: dict[Var, T] = dict(zip((*program.constvars, *program.invars), given, strict=True))
    last = _last_uses(program)

    def read(atom: Atom) -> T:
        return literal(atom.val) if isinstance(atom, Literal) else env[atom]

    for number, equation in enumerate(program.eqns):
        env.update(zip(equation.outvars, step(equation, list(map(read, equation.invars))), strict=True))
        for variable in last.get(number, ()):
            env.pop(variable, None)
    return list(map(read, program.outvars))


def _last_uses(jaxpr: Jaxpr) -> Mapping[int, list[Var]]:
    # By equation number, the variables whose last use is that equation.
    last: dict[Var, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys((*variables(equation.invars), *equation.outvars), number))
    kept = set(variables(jaxpr.outvars))
    result: dict[int, list[Var]] = {}
    for variable, number in last.items():
        if variable not in kept:
            result.setdefault(number, []).append(variable)
    return result
