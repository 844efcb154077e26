"""Decides which values of a traced program are tapped, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.modules import Modules
from hostcallback.api.observe.places import Site, Surroundings, is_recomputed, programs_of, site_of
from hostcallback.api.observe.statistics import can_measure
from hostcallback.api.observe.where import Selection

ENTERED = {
    "jit",
    "pjit",
    "remat2",
    "checkpoint",
    "remat",
    "shard_map",
    "scan",
    "while",
    "cond",
    "custom_jvp_call",
}
ENTERED |= {"custom_vjp_call", *compat.INLINE_CALLS}
"""The primitives whose programs are evaluated equation by equation if something in them is selected."""

PREFIXES = {"output": "", "input": "input ", "grad": "grad ", "outer grad": "grad "}


@dataclass
class Plan:
    """The values to tap in one program.

    Attributes:
        taps: by variable, the labels of the value.
        inside: by the number of an equation, the plans of the programs that it holds, for those with taps.
    """

    taps: dict[Any, list[str]] = field(default_factory=dict)
    inside: dict[int, list[Plan]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.taps or self.inside)

    def add(self, other: Plan) -> None:
        """Adds the taps of another plan of the same program."""
        for variable, labels in other.taps.items():
            self.taps.setdefault(variable, []).extend(labels)
        for number, plans in other.inside.items():
            for mine, more in zip(
                self.inside.setdefault(number, [Plan() for _ in plans]), plans, strict=True
            ):
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
        """Adds a label; if it is taken, with a number behind it."""
        unique, number = label, 1
        while unique in self.labels:
            number += 1
            unique = f"{label}#{number}"
        self.labels[unique] = None
        return unique

    def note(self, site: Site) -> None:
        """Remembers what an equation could be selected by."""
        for end in range(1, len(site.scope) + 1):
            self.names.setdefault("scope", {})["/".join(site.scope[:end])] = None
        if site.function:
            self.names.setdefault("jit", {})[site.function] = None
        for _, _, function in site.frames[:3]:
            self.names.setdefault("function", {})[function.rpartition(".")[2]] = None
        self.names.setdefault("primitive", {})[site.primitive] = None


@dataclass(frozen=True)
class Around:
    """What is known about a program from the one that holds it.

    Attributes:
        site: the scopes and lines of the equations around it.
        modules: the parameters among its inputs.
        needed: for each result, whether something else than a backward pass uses it.
        cotangents: for each input, whether a backward pass made it.
    """

    site: Surroundings
    modules: Modules
    needed: Sequence[bool]
    cotangents: Sequence[bool] = ()


@dataclass(frozen=True)
class _Equation:
    number: int
    equation: Any
    site: Site
    recomputed: bool
    label: str | None


class Planner:
    """Plans the taps of one selection.

    `what_of` says which values of a region: those that leave it ("output"), those that enter it ("input"), or the
    cotangents of those that leave it, which enter its backward pass ("grad"). "outer grad" plans the values that leave
    it, with the labels of their cotangents.
    """

    def __init__(self, selection: Selection, what_of: str, found: Found) -> None:
        self._selection = selection
        self._what_of = what_of
        self._found = found

    def plan(self, jaxpr: Any, around: Around) -> Plan:
        """Plans one program."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        equations = self._equations(jaxpr, around)
        plan, uses = Plan(), _uses(jaxpr, equations, around.needed)
        cotangents = _cotangents(equations, jaxpr, around)
        for one in equations:
            if one.label is None and not one.recomputed:
                self._plan_inside(plan, one, around, uses, cotangents)
        for label, region in self._regions(equations):
            if self._what_of in ("output", "outer grad"):
                values = _leaving(region, uses)
            else:
                values = _entering(region)
                values = [v for v in values if self._what_of == "input" or v in cotangents]
            self._tap(plan, label, values)
        return plan

    def _regions(self, equations: Sequence[_Equation]) -> list[tuple[str, list[_Equation]]]:
        regions: dict[Any, tuple[str, list[_Equation]]] = {}
        for one in equations:
            in_direction = one.site.backward == (self._what_of == "grad") and not one.recomputed
            if one.label is not None and in_direction:
                key = one.label if self._selection.is_region else one.number
                regions.setdefault(key, (one.label, []))[1].append(one)
        return list(regions.values())

    def _equations(self, jaxpr: Any, around: Around) -> list[_Equation]:
        result = []
        for number, equation in enumerate(jaxpr.eqns):
            site = site_of(equation, around.site)
            self._found.note(site)
            is_module = self._selection.kind == "module"
            label = around.modules.visit(equation, site) if is_module else self._selection.label(site)
            result.append(_Equation(number, equation, site, is_recomputed(equation), label))
        if self._selection.kind == "module":
            return _with_between(jaxpr, result)
        return result

    def _tap(self, plan: Plan, label: str, values: Sequence[Any]) -> None:
        values = [v for v in values if can_measure(v.aval) and v not in plan.taps]
        for i, value in enumerate(values):
            name = PREFIXES[self._what_of] + label
            unique = self._found.new_label(f"{name}[{i}]" if len(values) > 1 else name)
            plan.taps.setdefault(value, []).append(unique)

    def _plan_inside(
        self, plan: Plan, one: _Equation, around: Around, uses: Uses, cotangents: set[Any]
    ) -> None:
        name = one.site.primitive
        needed = [any(not back for _, back in uses.get(var, ())) for var in one.equation.outvars]
        before = dict(self._found.labels)
        plans = []
        for jaxpr, operands in programs_of(one.equation):
            there = Around(
                Surroundings().inside(one.site),
                around.modules.inside(jaxpr, operands),
                needed,
                [not isinstance(atom, Literal) and atom in cotangents for atom in operands],
            )
            inner = self.plan(jaxpr, there)
            if self._selection.kind == "carry" and name in ("scan", "while"):
                self._tap_carry(inner, one, jaxpr)
            plans.append(inner)
        if not any(plans):
            return
        if name in ENTERED:
            plan.inside[one.number] = plans
        else:
            self._found.labels = before
            self._found.not_entered.append(one.site)

    def _tap_carry(self, plan: Plan, one: _Equation, jaxpr: Any) -> None:
        if one.site.backward != (self._what_of == "grad"):
            return
        body, _ = compat.open_jaxpr(jaxpr)
        count = len(body.outvars)
        if one.site.primitive == "scan":
            count = len(compat.scan_groups(one.equation.params, one.equation.invars)[1])
        values = body.outvars[:count]
        line = one.site.source_line
        place = f"@{line.function.rpartition('.')[2]}:{line.line}" if line else ""
        for i, value in enumerate(values):
            if not isinstance(value, Literal) and value not in body.constvars:
                self._tap(plan, f"{'/'.join((*one.site.scope, 'carry'))}{place}[{i}]", [value])


Uses = dict[Any, list[tuple[str | None, bool]]]
"""By variable, the label of each equation that uses it, and whether that use is in a backward pass."""


def _uses(jaxpr: Any, equations: Sequence[_Equation], needed: Sequence[bool]) -> Uses:
    uses: Uses = {}
    for one in equations:
        for atom in one.equation.invars:
            if not isinstance(atom, Literal):
                uses.setdefault(atom, []).append((one.label, one.site.backward))
    for atom, is_needed in zip(jaxpr.outvars, needed, strict=True):
        if not isinstance(atom, Literal):
            uses.setdefault(atom, []).append((None, not is_needed))
    return uses


def _leaving(region: Sequence[_Equation], uses: Uses) -> list[Any]:
    label, single = region[0].label, len(region) == 1
    values = []
    for one in region:
        for var in one.equation.outvars:
            # Values that only a backward pass uses are residuals, no results.
            outside = [back for used_by, back in uses.get(var, ()) if used_by != label or single]
            if outside and (one.site.backward or not all(outside)):
                values.append(var)
    return values


def _entering(region: Sequence[_Equation]) -> list[Any]:
    made = {var for one in region for var in one.equation.outvars}
    read = [atom for one in region for atom in one.equation.invars if not isinstance(atom, Literal)]
    return [var for var in dict.fromkeys(read) if var not in made]


def _cotangents(equations: Sequence[_Equation], jaxpr: Any, around: Around) -> set[Any]:
    """The values that a backward pass made."""
    given = zip(jaxpr.invars, around.cotangents, strict=False)
    values = {var for var, is_cotangent in given if is_cotangent}
    for one in equations:
        # JAX adds cotangents outside of the scopes whose cotangents they are.
        adds = one.site.primitive == "add_any" and any(
            not isinstance(atom, Literal) and atom in values for atom in one.equation.invars
        )
        if (one.site.backward and not one.recomputed) or adds:
            values.update(one.equation.outvars)
    return values


def _with_between(jaxpr: Any, equations: list[_Equation]) -> list[_Equation]:
    """Adds to each region the equations between its own: those that depend on one and that another depends on."""
    labels = dict.fromkeys(e.label for e in equations if e.label is not None)
    reached: dict[str, set[int]] = {label: set() for label in labels}
    for label in labels:
        after = _spread(equations, label, forward=True)
        before = _spread(equations, label, forward=False)
        reached[label] = {i for i in after & before if not equations[i].site.backward}
    result = []
    for i, one in enumerate(equations):
        found = one.label or next((name for name in labels if i in reached[name]), None)
        result.append(_Equation(one.number, one.equation, one.site, one.recomputed, found))
    return result


def _spread(equations: Sequence[_Equation], label: str, *, forward: bool) -> set[int]:
    touched: set[Any] = set()
    found: set[int] = set()
    for i, one in enumerate(equations) if forward else reversed(list(enumerate(equations))):
        reads = [a for a in one.equation.invars if not isinstance(a, Literal)]
        makes = list(one.equation.outvars)
        sources, targets = (reads, makes) if forward else (makes, reads)
        own = one.label == label and not one.site.backward
        if own or any(v in touched for v in sources):
            touched.update(targets)
            found.add(i)
    return found
