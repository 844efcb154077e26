"""Decides which values of a traced program are tapped, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import Literal
from hostcallback.api.observe.places import (
    Labelled,
    Modules,
    Origins,
    Selection,
    Site,
    site_of,
    variables,
)  # fmt: skip
from hostcallback.api.observe.report import can_measure
from hostcallback.lowering.evaluator import structure_of
from hostcallback.tracing import source_line

PREFIXES = {"output": "", "input": "input ", "grad": "grad "}


@dataclass
class Plan:
    """The values to tap in one program.

    Attributes:
        taps: by variable, the labels of the value.
        inside: by the number of an equation, the plans of the programs that it holds, for those with taps.
        parameters: by label, what measures an update from the program's inputs and results.
    """

    taps: dict[Any, list[str]] = field(default_factory=dict)
    inside: dict[int, list[Plan]] = field(default_factory=dict)
    parameters: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.taps or self.inside or self.parameters)

    def inner(self, jaxpr: Any, path: Sequence[tuple[int, int]]) -> Plan:
        """The plan of a program inside, by the numbers of the equations around it, each with that of its program."""
        plan = self
        for number, i in path:
            structure = structure_of(compat.open_jaxpr(jaxpr)[0].eqns[number])
            programs = structure.programs if structure else ()
            plan, jaxpr = plan.inside.setdefault(number, [Plan() for _ in programs])[i], programs[i][0]
        return plan

    def by_place(self, jaxpr: Any, equations: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Plan]]:
        """The plans of the program and of those in it, by the identities of the equations around and of the program."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        yield (*equations, id(jaxpr)), self
        for number, plans in self.inside.items():
            structure = structure_of(jaxpr.eqns[number])
            programs = structure.programs if structure else ()
            for plan, (inner, _) in zip(plans, programs, strict=True):
                yield from plan.by_place(inner, (*equations, id(jaxpr.eqns[number])))

    def add(self, other: Plan) -> None:
        """Adds the taps of another plan of the same program."""
        self.parameters.update(other.parameters)
        for variable, labels in other.taps.items():
            self.taps.setdefault(variable, []).extend(labels)
        for number, plans in other.inside.items():
            known = self.inside.setdefault(number, [Plan() for _ in plans])
            for mine, more in zip(known, plans, strict=True):
                mine.add(more)


@dataclass
class Found:
    """What planning saw in the whole function.

    Attributes:
        labels: the labels of all tapped values, in the order of planning.
        names: by kind, the scopes, functions and primitives that there are.
        not_entered: equations whose programs have a match but cannot be evaluated one equation at a time.
    """

    labels: dict[str, None] = field(default_factory=dict)
    names: dict[str, dict[str, None]] = field(default_factory=dict)
    not_entered: list[Site] = field(default_factory=list)

    def new_label(self, label: str) -> str:
        """Adds a label, with a number appended if it is taken."""
        unique, number = label, 1
        while unique in self.labels:
            number += 1
            unique = f"{label}#{number}"
        self.labels[unique] = None
        return unique

    def note(self, site: Site) -> None:
        """Records the scopes, lines and primitives by which an equation could be selected."""
        for kind, path in (("scope", site.scope), ("call", site.calls)):
            paths = ("/".join(path[:end]) for end in range(1, len(path) + 1))
            self.names.setdefault(kind, {}).update(dict.fromkeys(paths))
        if site.function:
            self.names.setdefault("jit", {})[site.function] = None
        for _, _, function in site.frames[:3]:
            self.names.setdefault("function", {})[function.rpartition(".")[2]] = None
        self.names.setdefault("primitive", {})[site.primitive] = None


@dataclass(frozen=True)
class Around:
    """What an inner program inherits from the program that contains it.

    Attributes:
        site: the equation that holds it.
        marks: the marks of X-rays on the equations around it.
        modules: the parameters among its inputs.
        needed: for each result, whether something else than a backward pass uses it.
        cotangents: for each input, whether a backward pass made it.
    """

    site: Site
    marks: frozenset[str]
    modules: Modules
    needed: Sequence[bool]
    cotangents: Sequence[bool] = ()

    def inside(
        self,
        one: Labelled,
        jaxpr: Any,
        operands: Sequence[Any],
        needed: Sequence[bool],
        cotangents: Sequence[bool],
    ) -> Around:
        """Returns the `Around` of a program inside an equation."""
        return Around(
            one.site, self.marks_of(one.equation), self.modules.inside(jaxpr, operands), needed, cotangents
        )

    def marks_of(self, equation: Any) -> frozenset[str]:
        """The marks on an equation of the program."""
        return self.marks.union(source_line.marks_in(str(equation.source_info.name_stack)))


class Planner:
    """Plans the taps of one selection.

    `what_of` says which values of a region: those that leave it ("output"), those that enter it ("input"), or the
    cotangents of those that leave it, which enter its backward pass ("grad"). With a mark, only equations that have it
    are selected.
    """

    def __init__(self, selection: Selection, what_of: str, found: Found, mark: str = "") -> None:
        self._selection = selection
        self._mark = mark
        self._what_of = what_of
        self._found = found
        self._origins: Origins = {}

    def prepare(self, jaxpr: Any, around: Around) -> None:
        """Notes which operations belong to modules. Called before `plan`, which finds the backward pass by them."""
        if self._selection.kind != "module":
            return
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        equations = self._forward(jaxpr, around)
        for one in equations:
            if one.site.backward:
                continue
            origin = compat.equation_origin(one.equation)
            if origin:
                self._origins.setdefault(origin, set()).add(one.label)
            structure = structure_of(one.equation)
            for inner, operands in structure.programs if structure and one.label is None else ():
                self.prepare(inner, around.inside(one, inner, operands, (), ()))

    def plan(self, jaxpr: Any, around: Around) -> Plan:
        """Plans one program."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        equations = self._equations(jaxpr, around)
        live, plan = _live(jaxpr, equations, around.needed), Plan()
        uses = _uses(jaxpr, equations, around.needed, live)
        cotangents = _cotangents(equations, jaxpr, around)
        for one in equations:
            if one.label is None and not one.recomputed:
                self._plan_inside(plan, one, around, live, cotangents)
        for label, region in self._regions(equations):
            if self._what_of == "output":
                values = _leaving(region, uses)
            else:
                values = _entering(region)
                values = [v for v in values if self._what_of == "input" or v in cotangents]
            self._tap(plan, label, values)
        return plan

    def _regions(self, equations: Sequence[Labelled]) -> list[tuple[str, list[Labelled]]]:
        regions: dict[Any, tuple[str, list[Labelled]]] = {}
        for one in equations:
            in_direction = one.site.backward == (self._what_of == "grad") and not one.recomputed
            if one.label is not None and in_direction:
                key = one.label if self._selection.is_region else one.number
                regions.setdefault(key, (one.label, []))[1].append(one)
        return list(regions.values())

    def _equations(self, jaxpr: Any, around: Around) -> list[Labelled]:
        result = self._forward(jaxpr, around)
        if self._selection.kind == "module":
            return _with_between(around.modules.with_backward(result, self._origins), True)
        return result

    def _forward(self, jaxpr: Any, around: Around) -> list[Labelled]:
        result = []
        for number, equation in enumerate(jaxpr.eqns):
            if source_line.is_own(str(equation.source_info.name_stack)):
                continue  # of another X-ray
            site = site_of(equation, around.site)
            is_meant = not self._mark or self._mark in around.marks_of(equation)
            if is_meant:
                self._found.note(site)
            is_module = self._selection.kind == "module"
            label = around.modules.visit(equation, site) if is_module else self._selection.label(site)
            recomputed = source_line.is_recomputed(str(equation.source_info.name_stack))
            result.append(Labelled(number, equation, site, recomputed, label if is_meant else None))
        return _with_between(result, False) if self._selection.kind == "module" else result

    def _tap(self, plan: Plan, label: str, values: Sequence[Any]) -> None:
        values = [v for v in values if can_measure(v.aval) and v not in plan.taps]
        for i, value in enumerate(values):
            name = PREFIXES[self._what_of] + label
            unique = self._found.new_label(f"{name}[{i}]" if len(values) > 1 else name)
            plan.taps.setdefault(value, []).append(unique)

    def _plan_inside(
        self, plan: Plan, one: Labelled, around: Around, live: set[Any], cotangents: set[Any]
    ) -> None:
        carries = _carries(one.equation)
        # The next iteration uses a carry.
        needed = [i < carries or var in live for i, var in enumerate(one.equation.outvars)]
        before = dict(self._found.labels)
        plans = []
        structure = structure_of(one.equation)
        for jaxpr, operands in structure.programs if structure else ():
            results = len(compat.open_jaxpr(jaxpr)[0].outvars)
            of_results = needed if results == len(needed) else [True] * results
            given = [not isinstance(atom, Literal) and atom in cotangents for atom in operands]
            inner = self.plan(jaxpr, around.inside(one, jaxpr, operands, of_results, given))
            is_meant = not self._mark or self._mark in around.marks_of(one.equation)
            if self._selection.kind == "carry" and carries and is_meant:
                self._tap_carry(inner, one, jaxpr, carries)
            plans.append(inner)
        if not any(plans):
            return
        if structure is not None and structure.kind != "other":
            plan.inside[one.number] = plans
        else:
            self._found.labels = before
            self._found.not_entered.append(one.site)

    def _tap_carry(self, plan: Plan, one: Labelled, jaxpr: Any, count: int) -> None:
        if one.site.backward != (self._what_of == "grad"):
            return
        body, _ = compat.open_jaxpr(jaxpr)
        line = one.site.source_line
        place = f"@{line.function.rpartition('.')[2]}:{line.line}" if line else ""
        for i, value in enumerate(body.outvars[:count]):
            if not isinstance(value, Literal) and value not in body.constvars:
                self._tap(plan, f"{'/'.join((*one.site.scope, 'carry'))}{place}[{i}]", [value])


def _carries(equation: Any) -> int:
    if equation.primitive.name == "scan":
        return len(compat.scan_groups(equation.params, equation.invars)[1])
    return len(equation.outvars) if equation.primitive.name == "while" else 0


Uses = dict[Any, list[tuple[str | None, bool]]]
"""By variable, the label of each equation that uses it, and whether only a backward pass needs that use."""


def _uses(jaxpr: Any, equations: Sequence[Labelled], needed: Sequence[bool], live: set[Any]) -> Uses:
    uses: Uses = {}
    for one in equations:
        is_live = not one.site.backward and any(var in live for var in one.equation.outvars)
        for atom in one.reads():
            uses.setdefault(atom, []).append((one.label, not is_live))
    for atom, is_needed in zip(jaxpr.outvars, needed, strict=True):
        if not isinstance(atom, Literal):
            uses.setdefault(atom, []).append((None, not is_needed))
    return uses


def _live(jaxpr: Any, equations: Sequence[Labelled], needed: Sequence[bool]) -> set[Any]:
    """The values that the program's results depend on, leaving out dependencies through a backward pass."""
    live = set(variables(atom for atom, is_needed in zip(jaxpr.outvars, needed, strict=True) if is_needed))
    _add_sources(live, equations)
    made = {v: one for one in equations if not one.site.backward for v in one.equation.outvars}
    to_backward = {v for one in equations if one.site.backward for v in one.reads() if v in made}
    last = _last_result([v for v in made if v in to_backward], made)
    if live.isdisjoint(to_backward) and last is not None:
        # A training step has no use for the loss, so JAX has dropped it. The activations are for this.
        live.add(last)
        _add_sources(live, equations)
    return live


def _add_sources(live: set[Any], equations: Sequence[Labelled]) -> None:
    for one in reversed(equations):
        if not one.site.backward and any(v in live for v in one.equation.outvars):
            live.update(one.reads())


def _last_result(values: Sequence[Any], made: Mapping[Any, Labelled]) -> Any | None:
    """The result of the last operation among values in order; what its derivative needs has the same origin."""
    floats = [v for v in values if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    origins = [compat.equation_origin(made[v].equation) for v in floats]
    return floats[origins.index(origins[-1])] if floats else None


def _leaving(region: Sequence[Labelled], uses: Uses) -> list[Any]:
    label, single = region[0].label, len(region) == 1
    made = [var for one in region for var in one.equation.outvars]
    users = {v: [back for used_by, back in uses.get(v, ()) if used_by != label or single] for v in made}
    values = [v for v in made if users[v]]
    # Values that only a backward pass uses are residuals, no results.
    if results := [v for v in values if not all(users[v])]:
        return results
    last = _last_result(values, {v: one for one in region for v in one.equation.outvars})
    return [] if last is None else [last]


def _entering(region: Sequence[Labelled]) -> list[Any]:
    made = {var for one in region for var in one.equation.outvars}
    return [var for var in dict.fromkeys(var for one in region for var in one.reads()) if var not in made]


def _cotangents(equations: Sequence[Labelled], jaxpr: Any, around: Around) -> set[Any]:
    """The values that a backward pass made."""
    given = zip(jaxpr.invars, around.cotangents, strict=False)
    values = {var for var, is_cotangent in given if is_cotangent}
    for one in equations:
        # JAX adds cotangents outside of the scopes whose cotangents they are.
        adds = one.site.primitive == "add_any" and any(var in values for var in one.reads())
        is_zero = not one.reads() and not any(np.any(atom.val) for atom in one.equation.invars)
        if (one.site.backward and not one.recomputed and not is_zero) or adds:
            values.update(one.equation.outvars)
    return values


def _with_between(equations: list[Labelled], backward: bool) -> list[Labelled]:
    """Adds to each region the equations that lie between two of that region in the data flow."""
    result = list(equations)
    for label in dict.fromkeys(one.label for one in equations if one.label is not None):
        after = _spread(equations, label, backward, forward=True)
        for i in after & _spread(equations, label, backward, forward=False):
            if result[i].label is None and equations[i].site.backward == backward:
                result[i] = replace(result[i], label=label)
    return result


def _spread(equations: Sequence[Labelled], label: str, backward: bool, *, forward: bool) -> set[int]:
    touched: set[Any] = set()
    found: set[int] = set()
    for i, one in enumerate(equations) if forward else reversed(list(enumerate(equations))):
        reads, makes = one.reads(), list(one.equation.outvars)
        sources, targets = (reads, makes) if forward else (makes, reads)
        own = one.label == label and one.site.backward == backward
        if own or any(v in touched for v in sources):
            touched.update(targets)
            found.add(i)
    return found
