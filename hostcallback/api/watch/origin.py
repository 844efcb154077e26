"""Walks a recorded program on the inputs of a call, equation by equation, and finds where values cease to be finite.

Each operation runs by itself, so that nothing is compiled as a whole. A long loop runs compiled, up to the first
iteration that makes a value that is not finite; then the body of that iteration is walked. A `shard_map` runs on one
device: the program of all devices at once, with an axis for each axis of the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.watch.program_tests import Chosen, Flags, only_results, search, zeros
from hostcallback.api.watch.values import bad_of, evaluated, first_of, is_plain, numpy_of, operands_at
from hostcallback.lowering.equations import OUTERMOST, Loop, Position, interpret, loop_of, structure_of
from hostcallback.lowering.evaluator import Evaluator, Silent

Sources = frozenset["Origin"]
"""The origins from which a value that is not finite comes; empty for constants, such as a mask of -inf."""


@dataclass(eq=False)
class Origin:
    """An operation that made values that are not finite out of finite ones, or an input that has such values.

    Attributes:
        equation: the operation; None for an input.
        number: of the input, or of the operation's result.
        position: of its program, with the iterations of the loops around it.
        value: the result, as NumPy array.
        element: the index of its first element that is not finite.
        operands: texts about the operands at that element, by name.
        device: of a `shard_map`, the index of the device in its mesh; None elsewhere.
        of_finite: whether it is an operation of which all operands were finite.
    """

    equation: compat.JaxprEqn | None
    number: int
    position: Position
    value: np.ndarray[Any, Any]
    element: tuple[int, ...]
    operands: Mapping[str, str] = field(default_factory=dict)
    device: tuple[int, ...] | None = None
    of_finite: bool = False

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the operation's result, for as long as its program is kept."""
        return (*self.position.key, id(self.equation), self.number)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a program.

    Attributes:
        array: the value.
        sources: None if it is finite, otherwise where what is not comes from.
    """

    array: Any
    sources: Sources | None

    @classmethod
    def of(cls, array: Any, sources: Sources | None) -> Value:
        """A value that comes from these origins if it is not finite; None for no origin."""
        return cls(array, None if bad_of(array) is None else (sources or frozenset()))


def sources_of(values: Sequence[Value]) -> Sources:
    """The origins of all non-finite values among `values`."""
    return frozenset().union(*(value.sources or () for value in values))


class Walk:
    """One walk through a program. Used on one thread.

    Attributes:
        origins: what it has found, in program order, also what does not reach a result.
        entered: the origins of what chosen equations made that is not finite.
        callbacks: names and lines of the `pure_callback`s that it has called.
        per_device: the programs that it has walked instead of those of `shard_map`s, by the keys of their positions.
    """

    def __init__(
        self,
        flags: Flags = only_results,
        chosen: Chosen | None = None,
        *,
        compiles: bool = False,
    ) -> None:
        """Makes the walk.

        Args:
            compiles: whether every operation is compiled, and none evaluated by NumPy.
            flags: how to test the body of a loop.
            chosen: the equations for which `entered` is noted.
        """
        self.origins: list[Origin] = []
        self.entered: set[Origin] = set()
        self.per_device: dict[tuple[int, ...], compat.AnyJaxpr] = {}
        self._silent = Silent()
        self.callbacks = self._silent.callbacks
        self._compiles = compiles
        # An operation is an origin once, at its first iteration.
        self._known: dict[tuple[int, ...], Origin] = {}
        self._flags = flags
        self._chosen = chosen

    def run(self, closed: compat.ClosedJaxpr, values: Sequence[Any]) -> list[Value]:
        """Walks a program without constants on its inputs; returns its results."""
        inputs = [self._input(number, value) for number, value in enumerate(values)]
        return self._walk(closed, inputs, OUTERMOST)

    def _input(self, number: int, value: Any) -> Value:
        bad = bad_of(value)
        if bad is None:
            return Value(value, None)
        origin = Origin(None, number, OUTERMOST, np.asarray(value), first_of(bad))
        self.origins.append(origin)
        return Value(value, frozenset([origin]))

    def _walk(self, jaxpr: compat.AnyJaxpr, values: Sequence[Value], position: Position) -> list[Value]:
        return interpret(
            jaxpr,
            values,
            lambda equation, operands: self._equation(equation, operands, position),
            lambda constant: Value.of(constant, None),
        )

    def _equation(self, equation: compat.JaxprEqn, operands: list[Value], position: Position) -> list[Value]:
        kind, programs = structure_of(equation)
        if kind in ("call", "remat"):
            return self._walk(programs[0][0], operands, position.inside(equation))
        if kind == "cond":
            index = min(max(int(operands[0].array), 0), len(programs) - 1)
            return self._walk(programs[index][0], operands[1:], position.inside(equation))
        if kind in ("scan", "while"):
            return self._loop(equation, operands, position)
        if kind == "shard_map":
            return self._shard_map(equation, operands, position)
        if equation.primitive.name in _LAYOUTS:  # where values are is no matter here
            return operands
        arrays = [operand.array for operand in operands]
        simple = None if self._compiles else evaluated(equation, arrays)
        made = [simple] if simple is not None else self._silent.bind(equation, arrays)
        return [self._made(equation, number, out, operands, position) for number, out in enumerate(made)]

    def _made(
        self, equation: compat.JaxprEqn, number: int, out: Any, operands: list[Value], position: Position
    ) -> Value:
        bad = bad_of(out)
        if bad is None:
            return Value(out, None)
        sources = sources_of(operands)
        is_constant = not sources and any(operand.sources is not None for operand in operands)
        # Infinite constants are meant, as in a mask; a NaN that is made of them is not.
        if not sources and not (is_constant and not np.isnan(numpy_of(out)).any()):
            sources = frozenset([self._origin(equation, number, numpy_of(out), bad, operands, position)])
        if self._chosen is not None and self._chosen(equation, position):
            self.entered |= sources
        return Value(out, sources)

    def _origin(
        self,
        equation: compat.JaxprEqn,
        number: int,
        out: Any,
        bad: Any,
        operands: list[Value],
        position: Position,
    ) -> Origin:
        key = (*position.key, id(equation), number)
        if key in self._known:
            return self._known[key]
        element, arrays = first_of(bad), [numpy_of(operand.array) for operand in operands]
        texts, device, around = operands_at(arrays, out.shape, element), None, shard_map_around(position)
        mesh = compat.mesh_sizes(around.params) if around else ()
        axes = len(mesh)
        if axes and out.shape[:axes] == mesh:  # a device has one element of these axes
            device, element = element[:axes], element[axes:]
            out = out[device]
        of_finite = all(operand.sources is None for operand in operands)
        origin = Origin(equation, number, position, out, element, texts, device, of_finite)
        self._known[key] = origin
        self.origins.append(origin)
        return origin

    def _shard_map(self, equation: compat.JaxprEqn, operands: list[Value], position: Position) -> list[Value]:
        jaxpr, split, joined = per_device(equation, [operand.array for operand in operands])
        inner = [Value(a, operand.sources) for a, operand in zip(split, operands, strict=True)]
        there = position.inside(equation)
        outs = self._walk(self.per_device.setdefault(there.key, jaxpr), inner, there)
        arrays = joined([out.array for out in outs])
        return [Value(array, out.sources) for array, out in zip(arrays, outs, strict=True)]

    # ---- Loops -------------------------------------------------------------------------------------------------------

    def _loop(self, equation: compat.JaxprEqn, operands: list[Value], position: Position) -> list[Value]:
        loop = loop_of(equation, operands)
        if loop.length is not None and loop.length * _size(loop.body) <= MAX_EQUATIONS:
            return self._short_loop(equation, loop, position)
        arrays = [operand.array for operand in operands]
        program = jax.jit(search(equation, position.inside(equation), self._flags))
        outs, firsts, _ = program(np.int32(np.iinfo(np.int32).max), arrays)
        found = len(self.origins)
        flown: set[Origin] = set()
        becomes, nan, inside = (int(first) for first in firsts)
        unexplained = [{becomes, nan} - {-1}, {inside} - {-1}]
        for first in sorted(set().union(*unexplained)):
            if not any(first in group for group in unexplained):
                continue
            _, _, state = program(np.int32(first), arrays)
            before = len(self.origins)
            passing = self._iteration(equation, loop, first, state, position)
            if passing or len(self.origins) > before:
                unexplained = [group for group in unexplained if first not in group]
            flown |= passing
        sources = frozenset({*self.origins[found:], *flown}) or sources_of(operands)
        return [Value.of(out, sources) for out in outs]

    def _short_loop(self, equation: compat.JaxprEqn, loop: Loop, position: Position) -> list[Value]:
        carry, rows = loop.init, list[list[Value]]()
        for step in range(loop.length or 0):
            outs = self._body(equation, loop, step, carry, position)
            carry, ys = outs[: len(carry)], outs[len(carry) :]
            rows.append(ys)
        rows = rows[::-1] if loop.reverse else rows
        stacked = []
        for number, variable in enumerate(equation.outvars[len(carry) :]):
            values = [row[number] for row in rows]
            array = _stacked([value.array for value in values], variable.aval)
            stacked.append(Value.of(array, sources_of(values)))
        return [*carry, *stacked]

    def _body(
        self, equation: compat.JaxprEqn, loop: Loop, step: int, carry: Sequence[Value], position: Position
    ) -> list[Value]:
        number = int(loop.number(step))
        elements = [Value.of(x.array[number], x.sources) for x in loop.xs]
        iteration = loop.iteration(step, [value.array for value in carry])
        there = position.inside(equation, *map(int, iteration))
        outs = self._walk(loop.body, [*loop.consts, *carry, *elements], there)
        # Of an input that is scanned over: this is where it is used.
        for origin in sources_of(outs) & sources_of(elements):
            if not origin.position.iterations:
                origin.position = replace(origin.position, iterations=there.iterations)
        return outs

    def _iteration(
        self, equation: compat.JaxprEqn, loop: Loop, step: int, state: Sequence[Any], position: Position
    ) -> Sources:
        """Walks the body of one iteration; returns the origins before it from which its results come."""
        carry = [Value.of(array, before.sources) for array, before in zip(state, loop.init, strict=True)]
        found = len(self.origins)
        outs = self._body(equation, loop, step, carry, position)
        return sources_of(outs) - set(self.origins[found:])


_LAYOUTS = {"sharding_constraint", "device_put", "reshard", "mesh_cast", "optimization_barrier"}


MAX_EQUATIONS = 4000
"""A scan with no more equations in all its iterations is walked as it is; of others the iteration is found first."""


def _size(jaxpr: compat.AnyJaxpr) -> int:
    size = 0
    for equation in compat.open_jaxpr(jaxpr)[0].eqns:
        kind, programs = structure_of(equation)
        if kind == "while":
            return MAX_EQUATIONS + 1
        inner = max((_size(program) for program, _ in programs), default=0)
        size += max(inner * (equation.params["length"] if kind == "scan" else 1), 1)
    return size


def _stacked(arrays: Sequence[Any], aval: compat.Aval) -> Any:
    if not arrays:
        return zeros(aval)
    return np.stack(arrays) if all(map(is_plain, arrays)) else jnp.stack(arrays)


# ---- Devices ---------------------------------------------------------------------------------------------------------

Joined = Callable[[Sequence[Any]], list[Any]]


def shard_map_around(position: Position) -> compat.JaxprEqn | None:
    """The innermost shard_map around a position."""
    around = reversed(position.equations)
    return next((equation for equation in around if equation.primitive.name == "shard_map"), None)


def per_device(equation: compat.JaxprEqn, operands: Sequence[Any]) -> tuple[Any, list[Any], Joined]:
    """Splits a shard_map into the programs of its devices.

    Args:
        equation: the shard_map.
        operands: its operands, whole.

    Returns:
        The program of its devices as a closed jaxpr, whose values have an axis for each axis of the mesh, the inputs of
        that program, and what makes the results of the equation from its results.
    """
    params = equation.params
    axes, sizes = compat.shard_map_axes(params), compat.mesh_sizes(params)
    split = [_split(x, spec, axes, sizes) for x, spec in zip(operands, params["in_specs"], strict=True)]

    def inside(*values: Any) -> list[Any]:
        return _Devices().evaluate(params["jaxpr"], values)[0]

    mapped: Callable[..., Any] = inside
    for axis, size in reversed(list(zip(axes, sizes, strict=True))):
        mapped = jax.vmap(mapped, in_axes=0, out_axes=0, axis_name=axis, axis_size=size)
    closed = jax.make_jaxpr(mapped)(*split)

    def joined(outs: Sequence[Any]) -> list[Any]:
        return [_joined(x, spec, axes) for x, spec in zip(outs, params["out_specs"], strict=True)]

    return closed, split, joined


class _Devices(Evaluator):
    def enters(self, equation: compat.JaxprEqn, position: Position) -> bool:
        return True

    def bind(self, equation: compat.JaxprEqn, values: Sequence[Any]) -> list[Any]:
        outs = compat.collective_under_vmap(equation, values)
        return super().bind(equation, values) if outs is None else outs


def _names(spec: Any, ndim: int) -> list[tuple[Any, ...]]:
    # For each dimension the axes of the mesh over which it is divided.
    names = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    return names + [()] * (ndim - len(names))


def _split(x: Any, spec: Any, axes: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    size_of = dict(zip(axes, sizes, strict=True))
    names, shape, order = _names(spec, jnp.ndim(x)), [], []
    for dimension, parts in zip(jnp.shape(x), names, strict=True):
        shape += [size_of[part] for part in parts]
        order += list(parts)
        shape.append(dimension // functools.reduce(lambda a, b: a * b, (size_of[p] for p in parts), 1))
        order.append(None)
    x = jnp.reshape(x, shape)
    front = [order.index(axis) for axis in axes if axis in order]
    rest = [i for i, axis in enumerate(order) if axis is None]
    x = jnp.transpose(x, [*front, *rest])
    missing = [i for i, axis in enumerate(axes) if axis not in order]
    x = jnp.expand_dims(x, missing)
    return jnp.broadcast_to(x, [*sizes, *x.shape[len(sizes) :]])


def _joined(x: Any, spec: Any, axes: Sequence[Any]) -> jax.Array:
    ndim = x.ndim - len(axes)
    names = _names(spec, ndim)
    used = [name for parts in names for name in parts]
    index = tuple(slice(None) if axis in used else 0 for axis in axes)
    x = x[index]
    left = [axis for axis in axes if axis in used]
    order, shape = [], []
    for number, parts in enumerate(names):
        order += [left.index(part) for part in parts] + [len(left) + number]
        dims = [x.shape[left.index(part)] for part in parts] + [x.shape[len(left) + number]]
        shape.append(functools.reduce(lambda a, b: a * b, dims, 1))
    return jnp.reshape(jnp.transpose(x, order), shape)
