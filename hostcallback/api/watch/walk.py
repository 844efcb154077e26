"""Walks a recorded program on the inputs of a call, equation by equation, and finds where values cease to be finite.

Each operation runs by itself, so that nothing is compiled as a whole. A long loop runs compiled, up to the first
iteration that makes a value that is not finite; then the body of that iteration is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.api.watch.devices import per_device
from hostcallback.api.watch.loops import Flags, Search, of_results, scan_until, while_until, zeros
from hostcallback.api.watch.numpy_rules import evaluated
from hostcallback.api.watch.program_tests import Chosen
from hostcallback.api.watch.values import bad_of, first_of, is_plain, numpy_of, operands_at
from hostcallback.lowering.evaluator import Place, last_uses, structure_of
from hostcallback.lowering.silence import silently

Sources = frozenset["Origin"]
"""The origins from which a value that is not finite comes; empty for constants, such as a mask of -inf."""


@dataclass(eq=False)
class Origin:
    """An operation that made values that are not finite out of finite ones, or an input that has such values.

    Attributes:
        equation: the operation; None for an input.
        number: of the input, or of the operation's result.
        place: the equations around it.
        iteration: the iterations of the loops around it, outermost first.
        value: the result, as NumPy array.
        element: the index of its first element that is not finite.
        operands: texts about the operands at that element, by name.
        device: of a `shard_map`, the index of the device in its mesh; None elsewhere.
    """

    equation: Any
    number: int
    place: Place
    iteration: tuple[int, ...]
    value: np.ndarray[Any, Any]
    element: tuple[int, ...]
    operands: Mapping[str, str] = field(default_factory=dict)
    device: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Around:
    """Where the walk is: the equations and iterations around, and the sizes of the axes of a shard_map."""

    place: Place = field(default_factory=Place)
    iteration: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()

    def inside(self, equation: Any, *iteration: int) -> _Around:
        return replace(self, place=self.place.inside(equation), iteration=(*self.iteration, *iteration))


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a program.

    Attributes:
        array: the value.
        sources: None if it is finite, otherwise where what is not comes from.
    """

    array: Any
    sources: Sources | None


class Walk:
    """One walk. The thread that makes it.

    Attributes:
        origins: what it has found, in program order, also what does not reach a result.
        entered: the origins of what chosen equations made that is not finite.
        callbacks: names and lines of the `pure_callback`s that it has called.
    """

    def __init__(
        self,
        flags: Flags | None = None,
        chosen: Chosen | None = None,
        *,
        compiles: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the walk.

        Args:
            progress: called before each equation.
            compiles: whether every operation is compiled, and none evaluated by NumPy.
            flags: how to test the body of a loop; None for a test of what an iteration hands on.
            chosen: the equations for which `entered` is noted.
        """
        self.origins: list[Origin] = []
        self.entered: set[Origin] = set()
        self.callbacks: list[str] = []
        self._compiles = compiles
        self._progress = progress
        self._known: dict[
            tuple[Any, ...], Origin
        ] = {}  # an operation is an origin once, at its first iteration
        self._flags = flags
        self._chosen = chosen

    def run(self, closed: Any, values: Sequence[Any]) -> list[Value]:
        """Walks a program.

        Args:
            closed: the program, a closed jaxpr without constants.
            values: its inputs.

        Returns:
            Its results.
        """
        inputs = [self._input(number, value) for number, value in enumerate(values)]
        return self._walk(closed, inputs, _Around())

    def _input(self, number: int, value: Any) -> Value:
        bad = bad_of(value)
        if bad is None:
            return Value(value, None)
        origin = Origin(None, number, Place(), (), np.asarray(value), first_of(bad))
        self.origins.append(origin)
        return Value(value, frozenset([origin]))

    def _walk(self, jaxpr: Any, values: Sequence[Value], around: _Around) -> list[Value]:
        jaxpr, consts = compat.open_jaxpr(jaxpr)
        given = (*map(_constant, consts), *values)
        env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        last = last_uses(jaxpr)

        def read(atom: Any) -> Value:
            return _constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for number, equation in enumerate(jaxpr.eqns):
            outs = self._equation(equation, [read(atom) for atom in equation.invars], around)
            env.update(zip(equation.outvars, outs, strict=True))
            for variable in last.get(number, ()):
                env.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[Value], around: _Around) -> list[Value]:
        self._progress()
        structure = structure_of(equation)
        kind = structure.kind if structure else ""
        if kind in ("call", "remat"):
            assert structure is not None
            return self._walk(structure.programs[0][0], operands, around.inside(equation))
        if kind == "cond":
            branches = equation.params["branches"]
            index = min(max(int(operands[0].array), 0), len(branches) - 1)
            return self._walk(branches[index], operands[1:], around.inside(equation))
        if kind in ("scan", "while"):
            return self._loop(equation, operands, around)
        if kind == "shard_map":
            jaxpr, split, joined = per_device(equation, [operand.array for operand in operands])
            inner = [Value(a, operand.sources) for a, operand in zip(split, operands, strict=True)]
            there = replace(around.inside(equation), mesh=compat.mesh_sizes(equation.params))
            outs = self._walk(jaxpr, inner, there)
            arrays = joined([out.array for out in outs])
            return [Value(array, out.sources) for array, out in zip(arrays, outs, strict=True)]
        if equation.primitive.name in _PLACES:  # where values are is no matter here
            return operands
        arrays = [operand.array for operand in operands]
        simple = None if self._compiles else evaluated(equation, arrays)
        made = [simple] if simple is not None else silently(equation, arrays, self.callbacks)
        return [self._made(equation, number, out, operands, around) for number, out in enumerate(made)]

    def _made(self, equation: Any, number: int, out: Any, operands: list[Value], around: _Around) -> Value:
        bad = bad_of(out)
        if bad is None:
            return Value(out, None)
        made = self._unsound(equation, number, out, first_of(bad), operands, around)
        if made.sources and self._chosen is not None and self._chosen(equation, around.place):
            self.entered |= made.sources
        return made

    def _unsound(
        self,
        equation: Any,
        number: int,
        out: Any,
        element: tuple[int, ...],
        operands: list[Value],
        around: _Around,
    ) -> Value:
        unsound = [operand.sources for operand in operands if operand.sources is not None]
        sources: Sources = frozenset().union(*unsound)
        # Infinite constants are meant, as in a mask; a NaN that is made of them is not.
        if sources or (unsound and not np.isnan(numpy_of(out)).any()):
            return Value(out, sources)
        key = (equation, number, *around.place.equations)
        if key in self._known:
            return Value(out, frozenset([self._known[key]]))
        origin = self._known[key] = Origin(
            equation, number, around.place, around.iteration, numpy_of(out), element,
            operands_at([numpy_of(operand.array) for operand in operands], np.shape(out), element),
        )  # fmt: skip
        sizes = around.mesh
        if sizes and origin.value.shape[: len(sizes)] == sizes:  # a device has one element of these axes
            device, origin.element = element[: len(sizes)], element[len(sizes) :]
            origin.device, origin.value = device, origin.value[device]
        self.origins.append(origin)
        return Value(out, frozenset([origin]))

    # ---- Loops -------------------------------------------------------------------------------------------------------

    def _loop(self, equation: Any, operands: list[Value], around: _Around) -> list[Value]:
        is_scan = equation.primitive.name == "scan"
        if is_scan and equation.params["length"] * _size(equation.params["jaxpr"]) <= MOST_EQUATIONS:
            return self._short_loop(equation, operands, around)
        search = Search(self._flags or of_results, around.place.inside(equation))
        run = (scan_until if is_scan else while_until)(equation, search)
        arrays = [operand.array for operand in operands]
        program = jax.jit(run)
        outs, firsts, _ = program(np.int32(np.iinfo(np.int32).max), arrays)
        found = len(self.origins)
        flown: set[Origin] = set()
        for first in sorted({int(first) for first in firsts if first >= 0}):
            _, _, state = program(np.int32(first), arrays)
            flown |= self._iteration(equation, operands, first, state, around)
            if len(self.origins) > found or flown:
                break
        incoming = frozenset().union(*(o.sources for o in operands if o.sources is not None))
        sources = frozenset({*self.origins[found:], *flown}) or incoming
        return [Value(out, None if bad_of(out) is None else sources) for out in outs]

    def _short_loop(self, equation: Any, operands: list[Value], around: _Around) -> list[Value]:
        params = equation.params
        consts, carry, xs = compat.scan_groups(params, operands)
        rows: list[list[Value]] = []
        for step in range(params["length"]):
            number = params["length"] - 1 - step if params["reverse"] else step
            elements = [_sliced(x, number) for x in xs]
            outs = self._walk(params["jaxpr"], [*consts, *carry, *elements], around.inside(equation, number))
            self._note_iteration(outs, elements, (*around.iteration, number))
            carry, ys = outs[: len(carry)], outs[len(carry) :]
            rows.append(ys)
        rows = rows[::-1] if params["reverse"] else rows
        stacked = []
        for number, variable in enumerate(equation.outvars[len(carry) :]):
            values = [row[number] for row in rows]
            unsound = [value.sources for value in values if value.sources is not None]
            array = _stacked([value.array for value in values], variable.aval)
            stacked.append(Value(array, frozenset().union(*unsound) if unsound else None))
        return [*carry, *stacked]

    def _note_iteration(
        self, outs: Sequence[Value], elements: Sequence[Value], iteration: tuple[int, ...]
    ) -> None:
        # Of an input that is scanned over: this is where it is used.
        scanned = {origin for x in elements for origin in x.sources or ()}
        for origin in {origin for out in outs for origin in out.sources or ()} & scanned:
            origin.iteration = origin.iteration or iteration

    def _iteration(
        self, equation: Any, operands: list[Value], step: int, state: Sequence[Any], around: _Around
    ) -> set[Origin]:
        """Walks the body of one iteration; returns the origins before it from which its results come."""
        params = equation.params
        if equation.primitive.name == "scan":
            consts, init, xs = compat.scan_groups(params, operands)
            number = params["length"] - 1 - step if params["reverse"] else step
            elements = [_sliced(x, number) for x in xs]
            jaxpr = params["jaxpr"]
        else:
            number, first = step, params["cond_nconsts"]
            consts, init = (
                operands[first : first + params["body_nconsts"]],
                operands[first + params["body_nconsts"] :],
            )
            elements, jaxpr = [], params["body_jaxpr"]
        carry = [
            Value(array, None if bad_of(array) is None else (before.sources or frozenset()))
            for array, before in zip(state, init, strict=True)
        ]
        found = len(self.origins)
        outs = self._walk(jaxpr, [*consts, *carry, *elements], around.inside(equation, int(number)))
        sources = {origin for out in outs for origin in out.sources or ()}
        self._note_iteration(outs, elements, (*around.iteration, int(number)))
        return sources - set(self.origins[found:])


_PLACES = {"sharding_constraint", "device_put", "reshard", "mesh_cast", "optimization_barrier"}


MOST_EQUATIONS = 4000
"""A scan with no more equations in all its iterations is walked as it is; of others the iteration is found first."""


def _size(jaxpr: Any) -> int:
    size = 0
    for equation in compat.open_jaxpr(jaxpr)[0].eqns:
        structure = structure_of(equation)
        inner = max((_size(program) for program, _ in structure.programs), default=0) if structure else 0
        loops = equation.params["length"] if structure and structure.kind == "scan" else 1
        size += max(inner * loops, 1)
        if structure and structure.kind == "while":
            return MOST_EQUATIONS + 1
    return size


def _stacked(arrays: Sequence[Any], aval: Any) -> Any:
    if not arrays:
        return zeros(aval)
    return np.stack(arrays) if all(map(is_plain, arrays)) else jnp.stack(arrays)


def _sliced(x: Value, number: int) -> Value:
    element = x.array[int(number)]
    return Value(element, None if bad_of(element) is None else x.sources)


def _constant(value: Any) -> Value:
    return Value(value, None if bad_of(value) is None else frozenset())
