"""Finds the parameters of a program by path, their gradients, and their updated values."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback.api.observe import places, report
from hostcallback.api.observe.plan import Found, Plan
from hostcallback.lowering.equations import OUTERMOST, Position, interpret, structure_of, variables
from hostcallback.lowering.xray import Program
from hostcallback.primitives.device_ops import statistics
from hostcallback.tracing import source_line

_VIEWS = ("convert_element_type", "copy", "copy_p", "reshape", "sharding_constraint", "optimization_barrier")
_TURNED = (*_VIEWS, "transpose", "broadcast_in_dim")


def plan_parameters(pattern: str, what_of: str, program: Program, found: Found) -> Plan:
    """Plans the taps of parameters whose paths match a glob, such as `params/*/kernel` or `layers[2].weight`."""
    plan, (jaxpr, _) = Plan(), compat.open_jaxpr(program.tapped)
    labels = {
        number: label
        for number, (variable, path) in enumerate(zip(jaxpr.invars, program.paths, strict=True))
        if (label := places.match_whole_path(pattern, path)) is not None and report.can_measure(variable.aval)
    }
    if what_of == "param":
        for number, label in labels.items():
            plan.tap(OUTERMOST, jaxpr.invars[number], found.new_label(label))
    elif labels:
        flow = _Flow()
        results = flow.results(jaxpr, [_Value({i: 0}, frozenset([i])) for i in range(len(jaxpr.invars))])
        if what_of == "param grad":
            for number, gradient in _gradients(jaxpr, flow, labels).items():
                label = found.new_label(f"param grad {labels[number]}")
                plan.tap(gradient.position, gradient.variable, label)
        else:
            updates = _updates(program, results)
            for number in [number for number in labels if number in updates]:
                label = found.new_label(f"update {labels[number]}")
                plan.parameters[label] = functools.partial(_update, number, updates[number])
    return plan


def _update(
    number: int, result: int, values: Sequence[jax.Array], outs: Sequence[jax.Array], measure: Any
) -> Any:
    old, new = values[number], outs[result]
    measured = measure(new - old)
    if isinstance(measured, dict):
        sizes = [jnp.abs(value) for value in (new - old, old)]  # of complex values
        floats = [value.astype(jnp.promote_types(value.dtype, jnp.float32)) for value in sizes]
        norms = [statistics(value)["norm"] for value in floats]
        measured["ratio"] = norms[0] / norms[1]
    return measured


# ---- What values are made of -----------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A value of a program.

    Attributes:
        sum_with: the numbers of the inputs that it is a sum with, each with the number of other summands.
        views: the inputs that it has the elements of.
        makers: the origins of the operations that made it; of a sum, of its parts.
        backward: whether it depends on a backward pass.
    """

    sum_with: Mapping[int, int] = {}
    views: frozenset[int] = frozenset()
    makers: frozenset[Any] = frozenset()
    backward: bool = False


class _Gradient(NamedTuple):
    """A value that leaves a backward pass of the program at a position."""

    position: Position
    variable: compat.Var
    makers: frozenset[Any]


class _Flow:
    """Follows the values of a program, also through its loops and calls.

    Attributes:
        users: by the number of an input, in order of use, the origins of the forward operations that use it.
        gradients: what leaves the backward passes, of each program the last first.
    """

    def __init__(self) -> None:
        self.users: dict[int, set[Any]] = {}
        self.gradients: list[_Gradient] = []

    def results(
        self,
        jaxpr: compat.AnyJaxpr,
        inputs: Sequence[_Value],
        position: Position = OUTERMOST,
        backward: bool = False,
    ) -> list[_Value]:
        """Returns the results of a program; `backward` says whether it is part of a backward pass."""
        cotangents: dict[compat.Var, tuple[int, frozenset[Any]]] = {}
        leaving: dict[compat.Var, None] = {}
        numbers = itertools.count()

        def step(equation: compat.JaxprEqn, operands: list[_Value]) -> list[_Value]:
            number, given = next(numbers), [v for v in variables(equation.invars) if v in cotangents]
            is_backward = backward or source_line.is_backward(str(equation.source_info.name_stack))
            outs = self._made(equation, operands, position, is_backward)
            if is_backward or (given and equation.primitive.name in ("add_any", *_VIEWS)):
                made = zip(equation.outvars, outs, strict=True)
                cotangents.update((variable, (number, value.makers)) for variable, value in made)
            else:
                leaving.update(dict.fromkeys(given))
            return outs

        results = interpret(jaxpr, inputs, step, lambda constant: _Value())
        leaving.update(
            dict.fromkeys(v for v in variables(compat.open_jaxpr(jaxpr)[0].outvars) if v in cotangents)
        )
        if not backward:
            last_first = sorted(leaving, key=lambda variable: -cotangents[variable][0])
            self.gradients += [
                _Gradient(position, variable, cotangents[variable][1]) for variable in last_first
            ]
        return results

    def _made(
        self, equation: compat.JaxprEqn, operands: list[_Value], position: Position, backward: bool
    ) -> list[_Value]:
        name, structure = equation.primitive.name, structure_of(equation)
        origin = compat.equation_origin(equation)
        origins = frozenset([origin] if origin else [])
        if not backward:
            for used in itertools.chain(*(operand.views for operand in operands)):
                self.users.setdefault(used, set()).update(origins)
        if structure.is_open:
            found = []
            for program, atoms in structure.programs:
                # Its inputs are the last operands.
                inputs = [
                    value._replace(makers=frozenset()) for value in operands[len(operands) - len(atoms) :]
                ]
                outs = self.results(program, inputs, position.inside(equation), backward)
                found += [outs] if len(outs) == len(equation.outvars) else []
            if found:
                keeps = structure.kind in ("call", "remat", "cond")
                return [_one_of(outs, origins, keeps) for outs in zip(*found, strict=True)]
        if name == "optimization_barrier":
            return operands
        views = operands[0].views if name in _TURNED else frozenset()
        if name in ("add_any", "reduce_sum", *_TURNED):
            origins = origins.union(*(operand.makers for operand in operands))
        depends = backward or any(operand.backward for operand in operands)
        return [_Value(_sum_with(name, operands), views, origins, depends)] * len(equation.outvars)


def _one_of(values: Sequence[_Value], origins: frozenset[Any], keeps: bool) -> _Value:
    """Describes the result of one of several programs; `keeps`: whether it has the elements of the input."""
    return _Value(
        _sum_with("select_n", [_Value(), *values]),
        values[0].views if keeps and len(values) == 1 else frozenset(),
        origins.union(*(value.makers for value in values)),
        any(value.backward for value in values),
    )


def _sum_with(primitive: str, operands: Sequence[_Value]) -> Mapping[int, int]:
    if primitive in _VIEWS:
        return operands[0].sum_with
    found: dict[int, int] = {}
    if primitive == "select_n":
        # What is chosen may be the parameter itself, as where a step is skipped that is not finite.
        for number, count in itertools.chain(*(term.sum_with.items() for term in operands[1:])):
            found[number] = max(found.get(number, 0), count)
    elif primitive in ("add", "sub", "add_any"):
        terms = operands[:1] if primitive == "sub" else operands
        for number, count in itertools.chain(*(term.sum_with.items() for term in terms)):
            found[number] = min(found.get(number, count + 1), count + 1)
    return found


# ---- Gradients and updates -------------------------------------------------------------------------------------------


def _gradients(jaxpr: compat.Jaxpr, flow: _Flow, wanted: Container[int]) -> dict[int, _Gradient]:
    """Returns the gradient of each input in `wanted` that has one, by the input's number.

    A gradient leaves the backward pass, and has the origin of an operation that uses its parameter. Where several are
    alike, as in a loop of Python, the backward pass has the reverse order of the operations.
    """
    result: dict[int, _Gradient] = {}
    free = sorted(flow.gradients, key=lambda gradient: len(gradient.position.equations))
    for number, users in flow.users.items():
        shape = compat.aval_of(jaxpr.invars[number]).shape
        for gradient in free if number in wanted else ():
            # A loop may have a gradient for each of its iterations.
            shapes = (shape, shape[1:]) if gradient.position.equations else (shape,)
            if compat.aval_of(gradient.variable).shape in shapes and not users.isdisjoint(gradient.makers):
                result[number] = gradient
                free.remove(gradient)
                break
    return result


def _updates(program: Program, results: Sequence[_Value]) -> dict[int, int]:
    """Returns, by the number of an input, the number of the result that holds this parameter after the step.

    A sum of the parameter and something else. Of several, the one whose path has most in common with the parameter's,
    then one that depends on a backward pass, then the one with the fewest summands.
    """
    names = [re.findall(r"\w+", path) for path in compat.result_paths(program.closed)]
    found: dict[int, int] = {}
    for number, (aval, path) in enumerate(zip(program.closed.in_avals, program.paths, strict=True)):
        ranks = {
            i: (_common_end(path, names[i]), value.backward, -value.sum_with[number])
            for i, (value, out) in enumerate(zip(results, program.closed.out_avals, strict=True))
            if (out.shape, out.dtype) == (aval.shape, aval.dtype) and value.sum_with.get(number)
        }
        if ranks:
            found[number] = max(ranks, key=ranks.__getitem__)
    return found


def _common_end(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
