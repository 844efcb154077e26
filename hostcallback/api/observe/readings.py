"""The readings of the clock: where what enters a place is there, and where what it makes is, for its results and taps.

The operations of a place are put next to each other, as far as their operands allow. A reading is a call that takes the
arrays at an edge of the place and returns them, so that what makes them comes before and what uses them after it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import AnyJaxpr, JaxprEqn, Literal, Var
from hostcallback.api.observe.spans import Spans
from hostcallback.lowering.device_ops import COPIED_DTYPES
from hostcallback.lowering.equations import OUTERMOST, Position, structure_of, variables
from hostcallback.lowering.evaluator import Evaluator, Records, is_only_effect
from hostcallback.lowering.xray import UserError
from hostcallback.primitives.device_ops import edge
from hostcallback.receiver.sinks.time_rows import PROGRAM
from hostcallback.receiver.sinks.times import SECONDS, START
from hostcallback.tracing import source_line

# ---- The order of the operations -------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Operations of one place that follow each other; a place in it is a segment, too."""

    name: str
    steps: list[Any]

    def equations(self) -> Iterator[JaxprEqn]:
        """All its equations, in order."""
        for step in self.steps:
            yield from _equations(step)


def arranged(equations: Sequence[JaxprEqn], places: Sequence[tuple[str, ...]]) -> list[JaxprEqn | Segment]:
    """Orders the equations of a program so that those of a place follow each other, in as few segments as possible."""
    if not any(places):
        return list(equations)
    order = _Order(equations, [each[0] if each else None for each in places])
    steps: list[JaxprEqn | Segment] = []
    while order.ready:
        name = order.next_place()
        run = order.take(name)
        if name is None:
            steps += [equations[i] for i in run]
        else:
            inner = arranged([equations[i] for i in run], [places[i][1:] for i in run])
            steps.append(Segment(name, inner))
    return steps


class _Order:
    """Which equations can run next, by place."""

    def __init__(self, equations: Sequence[JaxprEqn], places: Sequence[str | None]) -> None:
        maker = {v: i for i, equation in enumerate(equations) for v in equation.outvars}
        self._places = places
        self._users: list[list[int]] = [[] for _ in equations]
        self._missing: list[int] = []
        self._left = Counter(places)
        self.ready: dict[str | None, list[int]] = {}
        last_effect: int | None = None
        for i, equation in enumerate(equations):
            needs = {maker[v] for v in variables(equation.invars) if v in maker}
            if equation.effects:  # these keep their order
                needs |= set() if last_effect is None else {last_effect}
                last_effect = i
            for each in needs:
                self._users[each].append(i)
            self._missing.append(len(needs))
            if not needs:
                self._add(i)

    def _add(self, i: int) -> None:
        heapq.heappush(self.ready.setdefault(self._places[i], []), i)

    def next_place(self) -> str | None:
        """What belongs to no place; else a place of which all is ready that is left; else the first one."""
        if None in self.ready:
            return None
        names = sorted(self.ready, key=lambda name: self.ready[name][0])
        return next((name for name in names if self._reach(name) == self._left[name]), names[0])

    def _reach(self, name: str | None) -> int:
        # The number of equations of the place that can follow each other now.
        taken, todo, seen = 0, list(self.ready[name]), Counter[int]()
        while todo:
            i = todo.pop()
            taken += 1
            for user in self._users[i]:
                seen[user] += 1
                if self._places[user] == name and seen[user] == self._missing[user]:
                    todo.append(user)
        return taken

    def take(self, name: str | None) -> list[int]:
        """Takes all equations of a place that can run now."""
        taken: list[int] = []
        while queue := self.ready.get(name):
            i = heapq.heappop(queue)
            if not queue:
                del self.ready[name]
            taken.append(i)
            for user in self._users[i]:
                self._missing[user] -= 1
                if not self._missing[user]:
                    self._add(user)
        self._left[name] -= len(taken)
        return taken


# ---- The readings ----------------------------------------------------------------------------------------------------

_TOKENS = ""
"""In the records: arrays that are there when what the effects of a program took was there. It is no name of a place."""

_LARGE = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _can_tie(variable: Var) -> bool:
    aval: Any = variable.aval
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype.name in COPIED_DTYPES and aval.size > 0


class Timer(Evaluator):
    """Evaluates a program, and reads the clock at the edges of its places.

    Attributes:
        timed: the places of which something was recorded.
    """

    def __init__(self, spans: Spans, send: Callable[[Records], None]) -> None:
        """Prepares the evaluation.

        Args:
            spans: the places. If all are in a shard_map, the time of the program is that of the shard_map.
            send: takes the records of an iteration of a while loop.
        """
        self._spans = spans
        self._entered = {key[:end] for key in spans.places for end in range(1, len(key))}
        self._whole = "shard_map" if spans.are_in_shard_map else ""
        self._send = send
        self.timed: set[str] = set()
        self._given: dict[int, Any] = {}
        """What programs are given and go on using, by id: inputs and constants, which an edge would have to copy."""
        self._operands: dict[int, list[bool]] = {}  # of equations that are entered, whether they are given

    def enters(self, equation: JaxprEqn, position: Position) -> bool:
        is_entered = (*position.key, id(equation)) in self._entered or _hides_effects(equation)
        if (
            is_entered
            and equation.primitive is compat.shard_map_p
            and compat.is_nested_shard_map(equation.params)
        ):
            raise UserError(
                'what="time" measures no part of a shard_map within a shard_map: time it as a program of one device, '
                f"or in a shard_map over all axes, at {source_line.user_source_line()}"
            )
        return is_entered

    def of_iteration(self, records: Records) -> Records:
        with jax.named_scope(source_line.OWN):
            if records:
                self._send(records)
        return {}

    def add(self, records: Records, inner: Records) -> None:
        if tokens := inner.pop(_TOKENS, []):
            records.setdefault(_TOKENS, []).extend(tokens)
        self.timed.update(inner)
        for name, times in inner.items():
            known = records.setdefault(name, {SECONDS: [], START: []})
            for part, found in times.items():
                known[part] += found

    def evaluate(
        self, jaxpr: AnyJaxpr, values: Sequence[jax.Array], position: Position = OUTERMOST
    ) -> tuple[list[jax.Array], Records]:
        """Evaluates a program; see `Evaluator`. Of one whose results do not tell, a token leaves it."""
        outs, records = super().evaluate(jaxpr, values, position)
        tokens = records.pop(_TOKENS, [])
        if tokens and position.equations and _hides_effects(position.equations[-1]):
            with jax.named_scope(source_line.OWN):
                stamp = self._no_stamp(position)
                records[_TOKENS] = [edge(tokens, stamp, stamp)[1]]
        return outs, records

    def _no_stamp(self, position: Position) -> Any:
        return np.zeros((self._spans.devices, 2) if self._spans.is_divided(position) else (2,), np.uint32)

    def _evaluate(
        self, jaxpr: AnyJaxpr, values: Sequence[jax.Array], position: Position, records: Records
    ) -> list[jax.Array]:
        program, consts = compat.open_jaxpr(jaxpr)
        self._given.update((id(value), value) for value in (*consts, *self._given_among(values, position)))
        places = [self._spans.places.get((*position.key, id(equation)), ()) for equation in program.eqns]
        kind = structure_of(position.equations[-1]).kind if position.equations else ""
        if kind == self._whole:
            places = [(PROGRAM, *each) for each in places]
            self._spans.axes[PROGRAM] = self._spans.axes_at(position)
        env = dict(zip((*program.constvars, *program.invars), (*consts, *values), strict=True))
        level = _Level(self, env, position, records, self._no_stamp(position))
        # What a branch or an iteration is given is awaited around it.
        level.awaited.update(() if kind in ("", "call") else program.invars)
        level.run(arranged(program.eqns, places), set(variables(program.outvars)))
        if tokens := level.take_sent():
            records[_TOKENS] = tokens
        return [level.read(atom) for atom in program.outvars]

    def _given_among(self, values: Sequence[Any], position: Position) -> list[Any]:
        if not position.equations:
            return list(values)
        equation = position.equations[-1]
        kind = structure_of(equation).kind
        flags = self._operands[id(equation)][-len(values) :] if values else []
        if kind == "scan":
            consts, carried, _ = map(len, compat.scan_groups(equation.params, values))
            flags = [True] * consts + [False] * carried + flags[consts + carried :]
        elif kind == "while":
            consts = equation.params["body_nconsts"]
            flags = [True] * consts + [False] * (len(values) - consts)
        return [value for value, is_given in zip(values, flags, strict=True) if is_given]

    def equation(
        self, equation: JaxprEqn, operands: list[Any], position: Position, records: Records
    ) -> Sequence[Any]:
        """Evaluates an equation."""
        with compat.equation_context(equation):
            if structure_of(equation).is_open and self.enters(equation, position):
                self._operands[id(equation)] = [self.is_given(value) for value in operands]
                return self._enter(equation, operands, position, records)
            return self.bind(equation, operands)

    def is_given(self, value: Any) -> bool:
        """Whether an edge would have to copy a value."""
        return id(value) in self._given


class _Level:
    """The evaluation of one program.

    Attributes:
        awaited: the values that need not be awaited where an effect takes them.
    """

    def __init__(
        self, timer: Timer, env: dict[Var, Any], position: Position, records: Records, stamp: Any
    ) -> None:
        self._timer = timer
        self._env = env
        self._position = position
        self._records = records
        self._backward: set[Var] = set()  # the values that a backward pass made
        self._last = stamp  # of the last reading
        self._sent: list[Var] = []  # what effects took since then, and nothing else needs
        self._tokens: list[Any] = []  # the same, of the programs in this one
        self.awaited: set[Var] = set()

    def read(self, atom: Any) -> Any:
        """The value of an operand."""
        return atom.val if isinstance(atom, Literal) else self._env[atom]

    def run(self, steps: Sequence[JaxprEqn | Segment], later: set[Var]) -> None:
        """Evaluates steps; what they make that is in `later` is used after them."""
        uses = [set(variables(atom for each in _equations(step) for atom in each.invars)) for step in steps]
        last_use = {variable: i for i, used in enumerate(uses) for variable in used}
        forward = {
            variable: i
            for i, step in enumerate(steps)
            for each in _equations(step)
            if not _is_backward(each)
            for variable in variables(each.invars)
        }
        equations = [each for step in steps for each in _equations(step)]
        needed = _sources(equations, later) if any(map(compat.acts_on_host, equations)) else set()
        for i, step in enumerate(steps):
            if isinstance(step, Segment):
                made = [v for each in step.equations() for v in each.outvars]
                leaving = [v for v in made if v in later or last_use.get(v, -1) > i]
                results = [v for v in leaving if v in later or forward.get(v, -1) > i]
                self._time(step, uses[i].difference(made), leaving, results)
            else:
                outs = self._timer.equation(
                    step, list(map(self.read, step.invars)), self._position, self._records
                )
                self._env.update(zip(step.outvars, outs, strict=True))
                self._tokens += self._records.pop(_TOKENS, [])
                if compat.acts_on_host(step):
                    self._sent += self._taken_by(step, needed | self.awaited)
                if _is_backward(step):
                    self._backward.update(step.outvars)

    def _taken_by(self, equation: JaxprEqn, needed: set[Var]) -> list[Var]:
        """What tells that an effect took place, or that its operands are there, if what is `needed` does not."""
        if self._timer.enters(equation, self._position) and structure_of(equation).kind == "call":
            return []  # there are tokens
        if not is_only_effect(equation) and not needed.isdisjoint(equation.outvars):
            return []
        made = [] if is_only_effect(equation) else list(filter(_can_tie, equation.outvars))
        taken = [min(made, key=_nbytes)] if made else variables(equation.invars)
        return [
            v for v in taken if v not in needed and _can_tie(v) and not self._timer.is_given(self._env[v])
        ]

    def take_sent(self) -> list[Any]:
        """What effects took since the last reading, and nothing else needs."""
        taken = [*map(self.read, dict.fromkeys(self._sent)), *self._tokens]
        self._sent, self._tokens = [], []
        return taken

    def _time(self, segment: Segment, entering: set[Var], leaving: list[Var], results: list[Var]) -> None:
        tied = [v for v in _awaited_results(segment, leaving, results) if _can_tie(v)]
        if not tied and not any(
            map(compat.acts_on_host, segment.equations())
        ):  # nothing tells when it is done
            self.run(segment.steps, set(leaving))
            return
        self._edge(self._awaited(segment, entering), self._last)
        start = self._last
        self.run(segment.steps, set(leaving))
        seconds = self._edge(tied, start)
        self._timer.add(self._records, {segment.name: {SECONDS: [seconds], START: [start]}})

    def _edge(self, tied: Sequence[Var], since: Any) -> Any:
        tied = list(dict.fromkeys((*tied, *self._sent)))
        self._sent, tokens, self._tokens = [], self._tokens, []
        with jax.named_scope(source_line.OWN):
            outs, self._last, seconds = edge([*map(self.read, tied), *tokens], self._last, since)
        self._env.update(zip(tied, outs, strict=False))  # nothing uses tokens
        return seconds

    def _awaited(self, segment: Segment, entering: set[Var]) -> list[Var]:
        """What a place waits for: what was computed, and as few inputs as its large operations need.

        A backward pass waits for what it was made of before; what the forward pass made has long been there.
        """
        candidates = [v for v in self._env if v in entering and _can_tie(v)]
        computed = [v for v in candidates if not self._timer.is_given(self._env[v])]
        is_backward = any(map(_is_backward, segment.equations()))
        tied = [v for v in computed if is_backward and v in self._backward] or computed
        given = [v for v in candidates if v not in set(tied)]
        masks = dict.fromkeys(tied, 1) | {v: 2 << i for i, v in enumerate(given)}
        reached: list[int] = []
        for equation in segment.equations():
            mask = 0
            for v in variables(equation.invars):
                mask |= masks.get(v, 0)
            masks.update(dict.fromkeys(equation.outvars, mask))
            if _is_large(equation):
                reached.append(mask)
        if not reached and not tied:
            reached = list(masks.values())
        while left := [mask for mask in reached if mask > 1 and not mask & 1]:
            best = max(
                range(len(given)),
                key=lambda i: (sum(mask >> (i + 1) & 1 for mask in left), -_nbytes(given[i])),
            )
            tied.append(given[best])
            reached = [mask for mask in left if not mask >> (best + 1) & 1]
        return tied


def _awaited_results(segment: Segment, leaving: list[Var], results: list[Var]) -> list[Var]:
    """What the end of a place waits for: its results, and all else with a large operation that these do not need.

    Other values that only a backward pass uses are left to the compiler, which computes many of them there.
    """
    if not results:
        return leaving
    equations = list(segment.equations())
    live = _sources(equations, results)
    after: set[Var] = set()
    for equation in equations:
        is_used = not live.isdisjoint(equation.outvars)
        if (_is_large(equation) and not is_used) or not after.isdisjoint(variables(equation.invars)):
            after.update(equation.outvars)
    return [v for v in leaving if v in results or v in after]


def _sources(equations: Sequence[JaxprEqn], values: Iterable[Var]) -> set[Var]:
    """Values, and all that they are computed from."""
    found = set(values)
    for equation in reversed(equations):
        if not found.isdisjoint(equation.outvars):
            found.update(variables(equation.invars))
    return found


def _hides_effects(equation: JaxprEqn) -> bool:
    """Whether the programs of an equation act on the host, and its results do not tell when these end.

    The compiler dissolves calls, and loops of one iteration. The results of other loops and of branches are there when
    all of these is done.
    """
    kind = structure_of(equation).kind
    if not structure_of(equation).is_open or not compat.acts_on_host(equation):
        return False
    if kind == "shard_map":  # in one over some axes only there are no readings
        return set(compat.shard_map_axes(equation.params)) == set(equation.params["mesh"].axis_names)
    return kind in ("call", "remat") or not equation.outvars or equation.params.get("length") == 1


def _is_backward(equation: JaxprEqn) -> bool:
    return source_line.is_backward(str(equation.source_info.name_stack))


def _is_large(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _LARGE or bool(structure_of(equation).programs)


def _equations(step: JaxprEqn | Segment) -> Iterator[JaxprEqn]:
    return step.equations() if isinstance(step, Segment) else iter((step,))


def _nbytes(variable: Var) -> int:
    aval: Any = variable.aval
    return int(aval.size * aval.dtype.itemsize)
