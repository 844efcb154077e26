"""Finds the parameters of a program by their paths, their gradients, and what an optimizer makes of them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.places import Surroundings, match_whole_path, site_of
from hostcallback.api.observe.plan import Found, Plan
from hostcallback.api.observe.report import can_measure
from hostcallback.lowering.evaluator import structure_of
from hostcallback.lowering.xray import Program
from hostcallback.primitives.reductions import statistics
from hostcallback.tracing import scopes

_ADDS = ("add", "sub", "add_any")
_VIEWS = ("convert_element_type", "copy", "copy_p", "reshape", "sharding_constraint", "optimization_barrier")


def plan_parameters(pattern: str, what_of: str, program: Program, found: Found) -> Plan:
    """Plans the taps of parameters whose paths match a glob.

    Args:
        pattern: the glob, such as `params/*/kernel` or `layers[2].weight`.
        what_of: "param", "param grad" or "update".
        program: a program of a training step.
        found: gets the labels.
    """
    plan, (jaxpr, _) = Plan(), compat.open_jaxpr(program.tapped)
    paths = [()] * len(program.constants) + list(program.paths)
    selected = [
        (number, variable, label)
        for number, (variable, path) in enumerate(zip(jaxpr.invars, paths, strict=True))
        if (label := match_whole_path(pattern, path)) is not None and can_measure(variable.aval)
    ]
    if what_of == "param":
        for _, variable, label in selected:
            plan.taps.setdefault(variable, []).append(found.new_label(label))
    elif what_of == "param grad":
        _plan_gradients(plan, jaxpr, {variable: label for _, variable, label in selected}, found)
    else:
        results = _updates(program) if selected else {}
        for number, _, label in selected:
            if number in results:
                unique = found.new_label(f"update {label}")
                plan.parameters[unique] = functools.partial(_update, number, results[number])
    return plan


def _plan_gradients(plan: Plan, jaxpr: Any, labels: Mapping[Any, str], found: Found) -> None:
    """Plans the taps of gradients, in the program or in a loop or call in it that has the backward pass."""
    gradients = _gradients(jaxpr, labels)
    for variable, value in gradients.items():
        plan.taps.setdefault(value, []).append(found.new_label(f"param grad {labels[variable]}"))
    missing = {variable: label for variable, label in labels.items() if variable not in gradients}
    for number, equation in enumerate(jaxpr.eqns):
        structure = structure_of(equation)
        if not missing or structure is None or structure.kind == "other":
            continue
        plans = [Plan() for _ in structure.programs]
        for inner_plan, (program, operands) in zip(plans, structure.programs, strict=True):
            inner, _ = compat.open_jaxpr(program)
            given = zip(inner.invars, operands, strict=False)
            known = {v: missing[a] for v, a in given if not isinstance(a, Literal) and a in missing}
            if known:
                _plan_gradients(inner_plan, inner, known, found)
        if any(plans):
            plan.inside[number] = plans


def _update(number: int, result: int, values: Sequence[Any], outs: Sequence[Any], measure: Any) -> Any:
    old, new = values[number], outs[result]
    measured = measure(new - old)
    if isinstance(measured, dict):
        sizes = [jnp.abs(value) for value in (new - old, old)]  # of complex values
        floats = [value.astype(jnp.promote_types(value.dtype, jnp.float32)) for value in sizes]
        norms = [statistics(value)["norm"] for value in floats]
        measured["ratio"] = norms[0] / norms[1]
    return measured


# ---- Updates ---------------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A value of a program: the inputs that it is a sum with, each with the number of other summands, and more."""

    sum_with: Mapping[int, int] = {}
    backward: bool = False  # whether it depends on a backward pass


def _results(jaxpr: Any, inputs: Sequence[_Value], backward: bool = False) -> list[_Value]:
    """The results of a program, as if its calls were inlined."""
    jaxpr, constants = compat.open_jaxpr(jaxpr)
    values = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*[_Value()] * len(constants), *inputs), strict=True)
    )

    def read(atom: Any) -> _Value:
        return _Value() if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        is_backward = backward or scopes.is_backward(str(equation.source_info.name_stack))
        structure = structure_of(equation)
        if structure is not None and structure.kind in ("call", "remat"):
            outs = _results(structure.programs[0][0], operands, is_backward)
        elif equation.primitive.name in _VIEWS:
            outs = operands[: len(equation.outvars)]  # a barrier has several
        else:
            inner = structure.programs if structure else ()
            depends = (
                is_backward or any(o.backward for o in operands) or any(_is_backward(p) for p, _ in inner)
            )
            outs = [_Value(_sum_with(equation.primitive.name, operands), depends)] * len(equation.outvars)
        values.update(zip(equation.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _sum_with(primitive: str, operands: Sequence[_Value]) -> Mapping[int, int]:
    # What is chosen may be the parameter itself, as where a step is skipped that is not finite.
    terms = operands[1:] if primitive == "select_n" else operands[:1] if primitive == "sub" else operands
    if primitive not in ("select_n", *_ADDS):
        return {}
    more = primitive in _ADDS
    found: dict[int, int] = {}
    for term in terms:
        for number, count in term.sum_with.items():
            known = found.get(number, count + more)
            found[number] = min(known, count + more) if more else max(known, count)
    return found


def _is_backward(jaxpr: Any) -> bool:
    for equation in compat.open_jaxpr(jaxpr)[0].eqns:
        structure = structure_of(equation)
        inner = structure.programs if structure else ()
        if scopes.is_backward(str(equation.source_info.name_stack)) or any(_is_backward(p) for p, _ in inner):
            return True
    return False


def _updates(program: Program) -> dict[int, int]:
    """By the number of an input, that of the result which is this parameter after the step.

    A sum of the parameter and something else. Of several, the one whose path has most in common with the parameter's,
    then one that depends on a backward pass, then the one with the fewest summands.
    """
    avals, out_avals = program.closed.in_avals, program.closed.out_avals
    paths = [()] * len(program.constants) + list(program.paths)
    names = [re.findall(r"\w+", path) for path in compat.result_paths(program.closed)]
    results = _results(program.tapped, [_Value({number: 0}) for number in range(len(avals))])
    found: dict[int, int] = {}
    for number, (aval, path) in enumerate(zip(avals, paths, strict=True)):
        ranks = {
            i: (_common_end(path, names[i]), value.backward, -value.sum_with[number])
            for i, (value, out) in enumerate(zip(results, out_avals, strict=True))
            if (out.shape, out.dtype) == (aval.shape, aval.dtype) and value.sum_with.get(number)
        }
        if ranks:
            found[number] = max(ranks, key=ranks.__getitem__)
    return found


def _common_end(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def _gradients(jaxpr: Any, variables: Container[Any]) -> dict[Any, Any]:
    """By input of a program, the value in it that is its gradient; for those of `variables` that have one.

    A gradient leaves the backward pass, and has the origin of an operation that uses its parameter. Where several are
    alike, as in a loop of Python, the backward pass has the reverse order of the operations.
    """
    cotangents: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        reads = [a for a in equation.invars if not isinstance(a, Literal)]
        passes = equation.primitive.name in ("add_any", *_VIEWS) and any(a in cotangents for a in reads)
        if passes or site_of(equation, Surroundings()).backward:
            cotangents.update(dict.fromkeys(equation.outvars, number))
    leaving: dict[Any, None] = {}
    for equation in jaxpr.eqns:
        if not any(variable in cotangents for variable in equation.outvars):
            leaving.update(dict.fromkeys(_variables(equation.invars, cotangents)))
    leaving.update(dict.fromkeys(_variables(jaxpr.outvars, cotangents)))
    makers = [(value, _makers(jaxpr, value)) for value in sorted(leaving, key=lambda v: -cotangents[v])]
    result: dict[Any, Any] = {}
    for variable in _in_order_of_use(jaxpr, variables):
        users = _users(jaxpr, variable)
        for value, origins in makers:
            is_like = value.aval.shape == variable.aval.shape and value not in result.values()
            if is_like and not users.isdisjoint(origins):
                result[variable] = value
                break
    return result


def _variables(atoms: Sequence[Any], among: Container[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal) and atom in among]


def _in_order_of_use(jaxpr: Any, variables: Container[Any]) -> list[Any]:
    return list(dict.fromkeys(v for equation in jaxpr.eqns for v in _variables(equation.invars, variables)))


def _users(jaxpr: Any, variable: Any) -> set[Any]:
    """The origins of the forward operations that use a value, also within loops and calls."""
    found: set[Any] = set()
    views = {variable}
    for equation in jaxpr.eqns:
        if not _variables(equation.invars, views) or site_of(equation, Surroundings()).backward:
            continue
        structure = structure_of(equation)
        for inner, operands in structure.programs if structure else ():
            inner, _ = compat.open_jaxpr(inner)
            for given, operand in zip(inner.invars, operands, strict=False):
                if not isinstance(operand, Literal) and operand in views:
                    found |= _users(inner, given)
        if origin := compat.equation_origin(equation):
            found.add(origin)
        if equation.primitive.name in (*_VIEWS, "transpose", "broadcast_in_dim"):
            views.update(equation.outvars)
    return found


def _makers(jaxpr: Any, value: Any) -> set[Any]:
    """The origins of the operations that made a value, also within loops and calls; of a sum, of its parts."""
    made_by = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    found: set[Any] = set()
    pending, seen = [value], set()
    while pending:
        atom = pending.pop()
        if isinstance(atom, Literal) or atom in seen or atom not in made_by:
            continue
        seen.add(atom)
        equation = made_by[atom]
        if origin := compat.equation_origin(equation):
            found.add(origin)
        structure = structure_of(equation)
        number = list(equation.outvars).index(atom)
        for inner, _ in structure.programs if structure else ():
            inner, _ = compat.open_jaxpr(inner)
            if len(inner.outvars) == len(equation.outvars):
                found |= _makers(inner, inner.outvars[number])
        if equation.primitive.name in ("add_any", *_VIEWS, "transpose", "reduce_sum"):
            pending.extend(equation.invars)
    return found
