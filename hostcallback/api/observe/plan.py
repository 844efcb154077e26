"""Decides which values of a traced program are tapped, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from hostcallback.api.observe.cotangents import Entering, Run, Runs, is_sum, named
from hostcallback.api.observe.places import Labelled, Modules, Origins, Selection, Site, site_of
from hostcallback.api.observe.report import can_measure
from hostcallback.lowering.equations import Position, structure_of, variables
from hostcallback.lowering.inputs import is_inexact
from hostcallback.tracing import source_line

PREFIXES = {"output": "", "input": "input ", "grad": "grad "}


@dataclass
class Plan:
    """The values to tap in a program and in those in it.

    Attributes:
        taps: by the key of the position of a program, and by variable, the labels of the value.
        parameters: by label, what measures an update from the program's inputs and results.
    """

    taps: dict[tuple[int, ...], dict[Var, list[str]]] = field(default_factory=dict)
    parameters: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.taps or self.parameters)

    def tap(self, position: Position, variable: Var, label: str) -> None:
        """Adds a label to a value of the program at a position."""
        self.taps.setdefault(position.key, {}).setdefault(variable, []).append(label)

    def add(self, other: Plan) -> None:
        """Adds the taps of another plan of the same program."""
        self.parameters.update(other.parameters)
        for key, taps in other.taps.items():
            for variable, labels in taps.items():
                self.taps.setdefault(key, {}).setdefault(variable, []).extend(labels)


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

    def new_label(self, label: str, but: Collection[str] = ()) -> str:
        """Adds a label, with a number appended if it is taken or one of some others."""
        unique, number = label, 1
        while unique in self.labels or unique in but:
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
        position: of the program.
        modules: the parameters among its inputs.
        needed: for each result, whether something else than a backward pass uses it.
        cotangents: for each input, whether a backward pass made it.
    """

    site: Site
    position: Position
    modules: Modules
    needed: Sequence[bool]
    cotangents: Sequence[bool] = ()

    def inside(
        self,
        one: Labelled,
        jaxpr: AnyJaxpr,
        operands: Sequence[Atom],
        needed: Sequence[bool] = (),
        cotangents: Sequence[bool] = (),
    ) -> Around:
        """Returns the `Around` of a program inside an equation."""
        position, modules = self.position.inside(one.equation), self.modules.inside(jaxpr, operands)
        return Around(one.site, position, modules, needed, cotangents)


@dataclass(frozen=True)
class Backward:
    """The backward pass of a place in one program.

    Attributes:
        position: of the program.
        label: of the place.
        region: the operations of the backward pass.
        entering: finds what enters them.
    """

    position: Position
    label: str
    region: Sequence[Labelled]
    entering: Entering


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
        self._runs: Runs | None = None
        self._backward: list[Backward] = []

    def prepare(self, jaxpr: AnyJaxpr, around: Around) -> None:
        """Notes which operations belong to modules. Called before `plan`, which finds the backward pass by them."""
        if self._selection.kind != "module":
            return
        for one in self._forward(compat.open_jaxpr(jaxpr)[0], around):
            if one.site.backward:
                continue
            origin = compat.equation_origin(one.equation)
            if origin:
                self._origins.setdefault(origin, set()).add(one.label)
            for inner, operands in structure_of(one.equation).programs if one.label is None else ():
                self.prepare(inner, around.inside(one, inner, operands))

    def plan(self, program: AnyJaxpr, around: Around) -> Plan:
        """Plans a whole program."""
        plan = self._plan(program, around)
        if self._backward:
            self._plan_cotangents(plan, self._runs_of(program, around))
        return plan

    def _runs_of(self, program: AnyJaxpr, around: Around) -> Runs:
        planner = Planner(self._selection, "output", Found(), self._mark)
        planner._origins = self._origins
        planner._runs = Runs(are_regions=self._selection.is_region)
        planner._plan(program, around)
        return planner._runs

    def _plan(self, program: AnyJaxpr, around: Around) -> Plan:
        jaxpr, _ = compat.open_jaxpr(program)
        equations = self.labelled(jaxpr, around)
        if self._runs is not None:
            self._runs.see(around.position, equations)
        live, plan = _live(jaxpr, equations, around.needed), Plan()
        uses = _uses(jaxpr, equations, around.needed, live)
        cotangents = _cotangents(equations, jaxpr, around)
        for one in equations:
            if one.label is None and not one.recomputed:
                self._plan_inside(plan, one, around, live, cotangents)
        entering = Entering(equations, cotangents)
        for label, region in self._regions(equations):
            if self._what_of == "grad":
                self._backward.append(Backward(around.position, label, region, entering))
                continue
            values = _leaving(region, uses) if self._what_of == "output" else _entering(region)
            names = self._tap(plan, around.position, label, values)
            if self._runs is not None:
                self._runs.name(around.position, label, names)
        return plan

    def _plan_cotangents(self, plan: Plan, runs: Runs) -> None:
        of_outputs = {PREFIXES["grad"] + name for name in runs.names()}
        taken: set[str] = set()
        for one in self._backward:
            members: dict[Run | None, list[Labelled]] = {}
            known = runs.of_backward(one.position, one.label, one.region, one.entering.cotangents)
            for run, each in zip(known, one.region, strict=True):
                members.setdefault(run, []).append(each)
            for run, of_run in members.items():
                values = one.entering.of_run(of_run, one.region)
                values = {v: by for v, by in values.items() if can_measure(v.aval)}
                names = named(run, values, taken)
                taken.update(names.values())
                known_values = plan.taps.get(one.position.key, {})
                others = [v for v in values if v not in names and v not in known_values]
                for value in values:
                    if value in names:
                        label = self._found.new_label(PREFIXES["grad"] + names[value])
                        plan.tap(one.position, value, label)
                    elif value in others:
                        number = f"[{others.index(value)}]" if len(others) > 1 else ""
                        label = self._found.new_label(f"{PREFIXES['grad']}{one.label}{number}", of_outputs)
                        plan.tap(one.position, value, label)

    def _regions(self, equations: Sequence[Labelled]) -> list[tuple[str, list[Labelled]]]:
        regions: dict[Any, tuple[str, list[Labelled]]] = {}
        for one in equations:
            in_direction = one.direction == ("backward" if self._what_of == "grad" else "forward")
            if one.label is not None and in_direction:
                key = one.label if self._selection.is_region else id(one.equation)
                regions.setdefault(key, (one.label, []))[1].append(one)
        return list(regions.values())

    def labelled(self, jaxpr: Jaxpr, around: Around) -> list[Labelled]:
        """The equations of a program, with the labels of the places that they belong to."""
        result = self._forward(jaxpr, around)
        if self._selection.kind == "module":
            result = around.modules.with_backward(result, self._origins)
            result = _with_between(_with_between(result, "recomputed"), "backward")
        return result

    def _forward(self, jaxpr: Jaxpr, around: Around) -> list[Labelled]:
        result = []
        for equation in jaxpr.eqns:
            if source_line.is_own(str(equation.source_info.name_stack)):
                continue  # of another X-ray
            site = site_of(equation, around.site)
            is_meant = around.position.has_mark(self._mark, equation)
            if is_meant:
                self._found.note(site)
            is_module = self._selection.kind == "module"
            recomputed = source_line.is_recomputed(str(equation.source_info.name_stack))
            label = (
                around.modules.visit(equation, site, recomputed) if is_module else self._selection.label(site)
            )
            result.append(Labelled(equation, site, recomputed, label if is_meant else None))
        return _with_between(result, "forward") if self._selection.kind == "module" else result

    def _tap(self, plan: Plan, position: Position, label: str, values: Sequence[Var]) -> dict[Var, str]:
        known = plan.taps.get(position.key, {})
        values = [v for v in values if can_measure(v.aval) and v not in known]
        names = {}
        for i, value in enumerate(values):
            name = PREFIXES[self._what_of] + label
            names[value] = self._found.new_label(f"{name}[{i}]" if len(values) > 1 else name)
            plan.tap(position, value, names[value])
        return names

    def _plan_inside(
        self, plan: Plan, one: Labelled, around: Around, live: set[Var], cotangents: set[Var]
    ) -> None:
        carries, structure = _carries(one.equation), structure_of(one.equation)
        # The next iteration uses a carry.
        needed = [i < carries or var in live for i, var in enumerate(one.equation.outvars)]
        before, found, backward = dict(self._found.labels), Plan(), len(self._backward)
        for jaxpr, operands in structure.programs:
            results = len(compat.open_jaxpr(jaxpr)[0].outvars)
            of_results = needed if results == len(needed) else [True] * results
            given = [not isinstance(atom, Literal) and atom in cotangents for atom in operands]
            inside = around.inside(one, jaxpr, operands, of_results, given)
            found.add(self._plan(jaxpr, inside))
            is_meant = around.position.has_mark(self._mark, one.equation)
            if self._selection.kind == "carry" and carries and is_meant:
                self._tap_carry(found, one, jaxpr, inside.position, carries)
        if structure.is_open:
            plan.add(found)
        elif found or len(self._backward) > backward:
            del self._backward[backward:]
            self._found.labels = before
            self._found.not_entered.append(one.site)

    def _tap_carry(self, plan: Plan, one: Labelled, jaxpr: AnyJaxpr, position: Position, count: int) -> None:
        if one.site.backward != (self._what_of == "grad"):
            return
        body, _ = compat.open_jaxpr(jaxpr)
        line = one.site.source_line
        place = f"@{line.function.rpartition('.')[2]}:{line.line}" if line else ""
        for i, value in enumerate(body.outvars[:count]):
            if not isinstance(value, Literal) and value not in body.constvars:
                label = f"{'/'.join((*one.site.scope, 'carry'))}{place}[{i}]"
                self._tap(plan, position, label, [value])


def _carries(equation: JaxprEqn) -> int:
    if equation.primitive.name == "scan":
        return len(compat.scan_groups(equation.params, equation.invars)[1])
    return len(equation.outvars) if equation.primitive.name == "while" else 0


Uses = dict[Var, list[tuple[str | None, bool]]]
"""By variable, the label of each equation that uses it, and whether only a backward pass needs that use."""


def _uses(jaxpr: Jaxpr, equations: Sequence[Labelled], needed: Sequence[bool], live: set[Var]) -> Uses:
    uses: Uses = {}
    for one in equations:
        is_live = not one.site.backward and any(var in live for var in one.equation.outvars)
        for atom in one.reads():
            uses.setdefault(atom, []).append((one.label, not is_live))
    for result, is_needed in zip(jaxpr.outvars, needed, strict=True):
        if not isinstance(result, Literal):
            uses.setdefault(result, []).append((None, not is_needed))
    return uses


def _live(jaxpr: Jaxpr, equations: Sequence[Labelled], needed: Sequence[bool]) -> set[Var]:
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


def _add_sources(live: set[Var], equations: Sequence[Labelled]) -> None:
    for one in reversed(equations):
        if not one.site.backward and any(v in live for v in one.equation.outvars):
            live.update(one.reads())


def _last_result(values: Sequence[Var], made: Mapping[Var, Labelled]) -> Var | None:
    """The result of the last operation among values in order; what its derivative needs has the same origin."""
    floats = [v for v in values if is_inexact(v.aval)]
    origins = [compat.equation_origin(made[v].equation) for v in floats]
    return floats[origins.index(origins[-1])] if floats else None


def _leaving(region: Sequence[Labelled], uses: Uses) -> list[Var]:
    label, single = region[0].label, len(region) == 1
    made = [var for one in region for var in one.equation.outvars]
    users = {v: [back for used_by, back in uses.get(v, ()) if used_by != label or single] for v in made}
    values = [v for v in made if users[v]]
    # Values that only a backward pass uses are residuals, no results.
    if results := [v for v in values if not all(users[v])]:
        return results
    last = _last_result(values, {v: one for one in region for v in one.equation.outvars})
    return [] if last is None else [last]


def _entering(region: Sequence[Labelled]) -> list[Var]:
    made = {var for one in region for var in one.equation.outvars}
    return [var for var in dict.fromkeys(var for one in region for var in one.reads()) if var not in made]


def _cotangents(equations: Sequence[Labelled], jaxpr: Jaxpr, around: Around) -> set[Var]:
    """The values that a backward pass made."""
    given = zip(jaxpr.invars, around.cotangents, strict=False)
    values = {var for var, is_cotangent in given if is_cotangent}
    for one in equations:
        # Versions of JAX differ in the scopes of a sum of cotangents.
        adds = is_sum(one) and any(var in values for var in one.reads())
        is_zero = all(isinstance(atom, Literal) and not np.any(atom.val) for atom in one.equation.invars)
        if (one.site.backward and not one.recomputed and not is_zero) or adds:
            values.update(one.equation.outvars)
    return values


def _with_between(equations: list[Labelled], direction: str) -> list[Labelled]:
    """Adds to each region the equations that lie between two of that region in the data flow."""
    result = list(equations)
    for label in dict.fromkeys(one.label for one in equations if one.label is not None):
        after = _spread(equations, label, direction, forward=True)
        for i in after & _spread(equations, label, direction, forward=False):
            if result[i].label is None and equations[i].direction == direction:
                result[i] = replace(result[i], label=label)
    return result


def _spread(equations: Sequence[Labelled], label: str, direction: str, *, forward: bool) -> set[int]:
    touched: set[Var] = set()
    found: set[int] = set()
    for i, one in enumerate(equations) if forward else reversed(list(enumerate(equations))):
        reads, makes = one.reads(), list(one.equation.outvars)
        sources, targets = (reads, makes) if forward else (makes, reads)
        own = one.label == label and one.direction == direction
        if own or any(v in touched for v in sources):
            touched.update(targets)
            found.add(i)
    return found
