"""Finds which values of a backward pass are the cotangents of which outputs of a place.

JAX keeps no link between the two. An operation of the backward pass has the scopes and the traceback of the operation
that it is the derivative of, and reads what that one read or made. A place that a program runs more than once, as a
loop of Python does, is divided into its runs by this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Atom, Literal, Var
from hostcallback.api.observe.places import Labelled
from hostcallback.lowering.equations import Position, structure_of, variables

Key = tuple[int, ...]
Value = tuple[Key, Var]
"""A variable, with the key of the position of its program: equal calls share a program."""
Order = tuple[int, ...]
"""Where an operation is in the whole program; operations that run earlier have less."""


@dataclass(eq=False)
class Run:
    """One run of a place: those of its operations between which no value leaves it and comes back.

    Attributes:
        key: of the position of its program.
        recomputed: whether `jax.checkpoint` runs it a second time.
        members: its operations.
        outputs: the labels of the values that leave it.
    """

    key: Key
    recomputed: bool
    members: list[tuple[Order, Labelled]]
    outputs: dict[Var, str] = field(default_factory=dict)

    def made(self) -> set[Var]:
        """The values that it computes."""
        return {v for _, one in self.members for v in one.equation.outvars}


class Runs:
    """The runs of all places of a selection in a whole program.

    With `are_regions`, all equations with one label in a program are one place, and else each is one.
    """

    def __init__(self, *, are_regions: bool) -> None:
        self._are_regions = are_regions
        self._runs: dict[str, list[Run]] = {}
        self._orders: dict[Key, Order] = {(): ()}
        self._same: dict[Value, Value] = {}
        self._touched: dict[tuple[Run, ...], dict[tuple[Value, Any], dict[Run, None]]] = {}

    def see(self, position: Position, equations: Sequence[Labelled]) -> None:
        """Adds the runs in a program. Called for a program before the programs in it."""
        key = position.key
        order = self._orders[key]
        for i, one in enumerate(equations):
            if one.label is None and not one.recomputed:
                self._orders[(*key, id(one.equation))] = (*order, i)
                self._enter(position, one)
        for direction in ("forward", "recomputed"):
            for label, runs in _runs_in(equations, direction, self._are_regions).items():
                self._runs.setdefault(label, []).extend(
                    Run(key, direction == "recomputed", [((*order, i), equations[i]) for i in run])
                    for run in runs
                )

    def _enter(self, position: Position, one: Labelled) -> None:
        inside = position.inside(one.equation).key
        programs = structure_of(one.equation).programs
        for program, operands in programs:
            jaxpr, _ = compat.open_jaxpr(program)
            if len(operands) == len(jaxpr.invars):
                for variable, atom in zip(jaxpr.invars, operands, strict=True):
                    self._is_same((inside, variable), position.key, atom)
            if len(programs) == 1 and len(jaxpr.outvars) == len(one.equation.outvars):
                for variable, atom in zip(one.equation.outvars, jaxpr.outvars, strict=True):
                    self._is_same((position.key, variable), inside, atom)

    def _is_same(self, value: Value, key: Key, atom: Atom) -> None:
        if not isinstance(atom, Literal):
            self._same[value] = (key, atom)

    def _value(self, position_key: Key, variable: Var) -> Value:
        value = (position_key, variable)
        while value in self._same:
            value = self._same[value]
        return value

    def name(self, position: Position, label: str, outputs: Mapping[Var, str]) -> None:
        """Notes the labels of values that leave a place, by the program that it is in and its own label."""
        for run in self._runs.get(label, ()):
            if run.key == position.key and not run.recomputed:
                made = run.made()
                run.outputs.update({v: name for v, name in outputs.items() if v in made})

    def names(self) -> set[str]:
        """The labels of all values that leave a place."""
        return {name for runs in self._runs.values() for run in runs for name in run.outputs.values()}

    def of_backward(
        self, position: Position, label: str, region: Sequence[Labelled], cotangents: Collection[Var]
    ) -> list[Run | None]:
        """For each operation of the backward pass of a place, the forward run that it belongs to; None if unknown."""
        known = sorted(self._runs.get(label, ()), key=lambda run: run.members[0][0])
        forward = [run for run in known if not run.recomputed]
        here = [run for run in known if run.recomputed and run.key == position.key]
        runs = self._spread(position.key, region, here or forward, cotangents)
        if not here:
            return runs
        originals = {run: self._original(run, here, forward) for run in here}
        return [None if run is None else originals[run] for run in runs]

    def _original(self, run: Run, here: Sequence[Run], forward: Sequence[Run]) -> Run | None:
        votes: Counter[Run] = Counter()
        for _, one in run.members:
            votes.update(self._votes(run.key, one, forward))
        of_same_number = forward[here.index(run)] if len(here) == len(forward) else None
        return _most(votes) or of_same_number

    def _spread(
        self, key: Key, region: Sequence[Labelled], runs: Sequence[Run], cotangents: Collection[Var]
    ) -> list[Run | None]:
        if len(runs) < 2 and self._are_regions:
            return [runs[0] if runs else None] * len(region)
        found = [_most(self._votes(key, one, runs)) for one in region]
        return _Aligned(region, found, runs, cotangents).runs() if self._are_regions else found

    def _votes(self, key: Key, one: Labelled, runs: Sequence[Run]) -> Counter[Run]:
        """How many of an operation's operands are of each run."""
        touched = self._of_runs(runs)
        for origin in (one.origin, None) if self._are_regions else (one.origin,):
            votes: Counter[Run] = Counter()
            for variable in one.reads():
                votes.update(touched.get((self._value(key, variable), origin), {}).keys())
            if _most(votes):
                return votes
        return Counter()

    def _of_runs(self, runs: Sequence[Run]) -> Mapping[tuple[Value, Any], Mapping[Run, None]]:
        if (known := self._touched.get(tuple(runs))) is not None:
            return known
        touched = self._touched[tuple(runs)] = {}
        for run in runs:
            for _, one in run.members:
                for variable in (*one.reads(), *one.equation.outvars):
                    for origin in (one.origin, None):
                        touched.setdefault((self._value(run.key, variable), origin), {})[run] = None
        return touched


def _most(votes: Counter[Run]) -> Run | None:
    first, second = [*votes.most_common(2), (None, 0), (None, 0)][:2]
    return first[0] if first[1] > second[1] else None


class _Aligned:
    """Finds the runs of a backward pass whose order is that of the forward pass, reversed.

    Args:
        region: the operations of the backward pass.
        found: the runs of those that read what is of one run only; else None.
        runs: all of them.
        cotangents: the values that a backward pass made.
    """

    def __init__(
        self,
        region: Sequence[Labelled],
        found: Sequence[Run | None],
        runs: Sequence[Run],
        cotangents: Collection[Var],
    ) -> None:
        self._region = region
        self._found = list(found)
        self._runs = runs
        self._cotangents = cotangents
        self._by_origin: dict[Any, list[tuple[Order, Run, str]]] = {}
        for run in runs:
            for order, one in run.members:
                self._by_origin.setdefault(one.origin, []).append((order, run, one.site.primitive))
        self._made = {v: i for i, one in enumerate(region) for v in one.equation.outvars}
        self._add_what_is_handed_on()
        self._readers: dict[Var, Counter[Run]] = {}
        for one, known in zip(region, self._found, strict=True):
            if known is not None and not is_sum(one):
                for variable in one.reads():
                    self._readers.setdefault(variable, Counter())[known] += variable in cotangents

    def _add_what_is_handed_on(self) -> None:
        # An operation of no run's source line, as in the backward function of a `custom_vjp`, is of the run that reads
        # its result, or made what it reads.
        reader: dict[Var, Run] = {}
        unknown: list[int] = []
        for i in reversed(range(len(self._region))):
            one = self._region[i]
            if is_sum(one):
                continue
            if self._found[i] is None and one.origin not in self._by_origin:
                self._found[i] = next((reader[v] for v in one.equation.outvars if v in reader), None)
                unknown.append(i)
            if (run := self._found[i]) is not None:
                reader.update(dict.fromkeys(one.reads(), run))
        for i in reversed(unknown):
            makers = (self._made[v] for v in self._region[i].reads() if v in self._made)
            known = (self._found[maker] for maker in makers if not is_sum(self._region[maker]))
            self._found[i] = self._found[i] or next(filter(None, known), None)

    def runs(self) -> list[Run | None]:
        """The run of each operation."""
        here: Order | None = None
        past: dict[Any, list[Any]] = {}
        for i, one in enumerate(self._region):
            origin = one.origin
            run = self._found[i] or self._of_readers(one) or self._of_maker(one, origin)
            if run is None:
                run = self._last(i, origin, here, past)
            self._found[i] = run
            past.setdefault((run, self._form(one, origin)), []).append(one.equation.params)
            of_origin = [order for order, of, _ in self._by_origin.get(origin, ()) if of is run]
            orders = of_origin or [run.members[-1][0]]
            here = max([order for order in orders if here is None or order <= here] or orders)
        return self._found

    def _of_readers(self, one: Labelled) -> Run | None:
        """The run of which other operations read the same cotangents."""
        votes = sum((self._readers.get(v, Counter()) for v in one.reads()), Counter[Run]())
        return None if is_sum(one) else _most(votes)

    def _of_maker(self, one: Labelled, origin: Any) -> Run | None:
        """The run of another part of the same derivative, whose result an operation reads."""
        for atom in one.equation.invars[-1:] if is_sum(one) else one.reads():
            i = None if isinstance(atom, Literal) else self._made.get(atom)
            if i is None:
                continue
            maker = self._region[i]
            if maker.origin == origin and maker.site.primitive not in ("add_any", one.site.primitive):
                return self._found[i]
        return None

    def _last(self, i: int, origin: Any, here: Order | None, past: Mapping[Any, list[Any]]) -> Run:
        """The last run that is not over, for an operation that reads nothing that is of one run only."""
        one, last = self._region[i], self._found[i - 1] if i else None
        following = next((run for run in self._found[i:] if run is not None), None)
        if here is None and following is not None:
            here = following.members[-1][0]
        known = self._by_origin.get(origin, ())
        # An equal part of the derivative of an operation that a run has once is of another run.
        count = sum(run is last and primitive == one.site.primitive for _, run, primitive in known)
        equal = past.get((last, self._form(one, origin)), ()) if count < 2 and not is_sum(one) else ()
        is_over = any(params == one.equation.params for params in equal)
        earlier = [
            (order, run)
            for order, run, _ in known
            if (here is None or order <= here) and not (is_over and run is last)
        ]
        latest = max(earlier, key=lambda each: each[0], default=None)
        return latest[1] if latest else last or following or self._runs[-1]

    def _form(self, one: Labelled, origin: Any) -> Any:
        kept = (
            str(atom) if isinstance(atom, Literal) else _type(atom.aval) if atom in self._cotangents else atom
            for atom in one.equation.invars
        )
        return one.site.primitive, origin, tuple(kept)


def _runs_in(
    equations: Sequence[Labelled], direction: str, are_regions: bool
) -> Mapping[str, list[list[int]]]:
    own: dict[str, list[int]] = {}
    for i, one in enumerate(equations):
        if one.label is not None and one.direction == direction:
            own.setdefault(one.label, []).append(i)
    if not are_regions:
        return {label: [[i] for i in members] for label, members in own.items()}
    return {label: _divided(equations, members) for label, members in own.items()}


_Number = tuple[int, int]
"""Of a run: the number of backward passes before it, and how often a value left the place and came back."""


def _divided(equations: Sequence[Labelled], members: Iterable[int]) -> list[list[int]]:
    """Divides the operations of a place at a backward pass, and where what was made of its outputs enters it again."""
    own = dict.fromkeys(members)
    first, last = next(iter(own)), next(reversed(own))
    numbers: dict[int, _Number] = {}
    inside: dict[Var, int] = {}
    outside: dict[Var, int] = {}
    passes, in_pass = 0, False
    for i in range(first, last + 1):
        one = equations[i]
        reads, made = one.reads(), one.equation.outvars
        depths = [inside[v] for v in reads if v in inside]
        if i in own:
            passes, in_pass = passes + in_pass, False
            depths += [outside[v] + 1 for v in reads if v in outside]
            numbers[i] = (passes, max(depths, default=0))
            inside.update(dict.fromkeys(made, numbers[i][1]))
            continue
        in_pass |= one.direction == "backward"
        if depths := [*depths, *(outside[v] for v in reads if v in outside)]:
            outside.update(dict.fromkeys(made, max(depths)))
    if any(numbers[i] != numbers[first] for i in own):
        numbers.update(_numbers_of_first(equations, [i for i in own if not numbers[i][1]], numbers))
    return [[i for i in own if numbers[i] == number] for number in sorted({*numbers.values()})]


def _numbers_of_first(
    equations: Sequence[Labelled], first: Sequence[int], numbers: Mapping[int, _Number]
) -> Mapping[int, _Number]:
    """The runs of operations that need no other run: those of a bias are of the first run that uses them."""
    used: dict[Var, _Number] = {}
    result: dict[int, _Number] = {}
    unsettled = {*first}
    for i in reversed(range(len(equations))):
        one = equations[i]
        number = numbers.get(i, (0, 0))
        if i in unsettled:
            users = [used[v] for v in one.equation.outvars if v in used]
            if not users:
                continue
            number = result[i] = max(number, min(users))
        if i in numbers or one.direction == "forward":
            for variable in one.reads():
                used[variable] = min(number, used.get(variable, number))
    # What only a backward pass uses is of the run that it was computed from.
    made: dict[Var, _Number] = {}
    for i in first:
        of_reads = [made[v] for v in equations[i].reads() if v in made]
        number = result.setdefault(i, max(of_reads, default=numbers[i]))
        made.update(dict.fromkeys(equations[i].equation.outvars, number))
    return result


# ---- Cotangents ------------------------------------------------------------------------------------------------------


def is_sum(one: Labelled) -> bool:
    """Whether an operation of a backward pass adds two cotangents of one value."""
    return one.site.primitive == "add_any"


class Entering:
    """The cotangents that enter the backward pass of runs in a program.

    JAX gives a sum of cotangents the scopes of the operation whose derivative has been added last, which need not be
    of the place that the value is from. So the scopes of a sum do not count here.

    Args:
        equations: those of the program.
        cotangents: the values that a backward pass made.
    """

    def __init__(self, equations: Sequence[Labelled], cotangents: Collection[Var]) -> None:
        self.cotangents = cotangents
        self._numbers = {v: i for i, one in enumerate(equations) for v in one.equation.outvars}
        self._sums = [(i, one) for i, one in enumerate(equations) if is_sum(one)]

    def of_run(self, members: Sequence[Labelled], region: Sequence[Labelled]) -> dict[Var, Labelled]:
        """The cotangents that enter the operations of a run, each with the first that reads it.

        `region` has those of all runs of the place.

        A value that the place uses too has a sum of cotangents, of which those of other uses count. A sum of these that
        no operation computes is left out.
        """
        summands, of_place = self._summands(members), self._summands(region)
        found: dict[Var, Labelled] = {}
        for one in members:
            atoms: Iterable[Var] = one.reads()
            if is_sum(one):
                # JAX adds to what there is already. A cotangent that the place lets through is added in its scope.
                added = variables(one.equation.invars[-1:])
                atoms = [v for v in added if v not in of_place]
            for variable in atoms:
                outer = summands.get(variable, [variable])
                if len(outer) == 1 and outer[0] in self.cotangents:
                    found.setdefault(outer[0], one)
        return found

    def _summands(self, members: Sequence[Labelled]) -> dict[Var, list[Var]]:
        """For the results of operations and the sums with one of these, the summands that are of others."""
        summands: dict[Var, list[Var]] = {
            v: [] for one in members if not is_sum(one) for v in one.equation.outvars
        }
        first = min((self._numbers[v] for v in summands), default=0)
        for number, one in self._sums:
            reads = one.reads()
            if number > first and any(v in summands for v in reads):
                outer = [v for read in reads for v in summands.get(read, [read])]
                summands[one.equation.outvars[0]] = list(dict.fromkeys(outer))
        return summands


def _type(aval: Any) -> Any:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def _as_made(values: Mapping[Var, Labelled]) -> list[Var]:
    """Cotangents in the order of their outputs.

    What was made last has the first cotangent, but those that one operation reads are of one operation, in its order.
    """
    read_by: dict[int, list[Var]] = {}
    for value, one in values.items():
        read_by.setdefault(id(one), []).append(value)
    return [value for group in reversed(read_by.values()) for value in group]


def named(run: Run | None, values: Mapping[Var, Labelled], taken: Collection[str]) -> dict[Var, str]:
    """The labels of the outputs whose cotangents these values are, as far as that is known.

    The output's type decides, then the operation that made it, then the order.
    """
    if run is None:
        return {}
    result: dict[Var, str] = {}
    makers = {v: one.origin for _, one in run.members for v in one.equation.outvars}
    free = {v: name for v, name in run.outputs.items() if name not in taken}
    for by_origin in (True, False):
        groups: dict[Any, tuple[list[Var], list[Var]]] = {}
        for output in free:
            kind = (_type(output.aval), makers[output] if by_origin else None)
            groups.setdefault(kind, ([], []))[0].append(output)
        for value in [v for v in _as_made(values) if v not in result]:
            kind = (_type(value.aval), values[value].origin if by_origin else None)
            groups.setdefault(kind, ([], []))[1].append(value)
        for outputs, cotangents in groups.values():
            if len(outputs) == len(cotangents) and (len(outputs) == 1 or not by_origin):
                pairs = zip(cotangents, outputs, strict=True)
                result.update({value: free.pop(output) for value, output in pairs})
    return result
