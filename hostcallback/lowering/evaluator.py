"""Evaluates a whole program equation by equation, also in its loops, branches and calls, while it is traced again.

This is for programs that JAX is about to lower, which nothing differentiates or batches any more: functions with custom
derivatives are calls, and a checkpoint is one with a barrier. `Silent` leaves out the effects of a program that runs a
second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import AnyJaxpr, Jaxpr, JaxprEqn
from hostcallback.lowering.equations import OUTERMOST, Position, interpret, loop_of, structure_of
from hostcallback.primitives.call import call_p
from hostcallback.primitives.cells import now, read_cell_p
from hostcallback.primitives.tap import tap_p
from hostcallback.tracing.source_line import first_user_line

Records = dict[str, Any]
"""What was measured, by label. A scan adds a leading axis of iterations to each array, a shard_map one of devices."""


class Evaluator:
    """Evaluates a program; subclasses say which equations to enter, and see the values. The thread that lowers.

    Attributes:
        counts: whether positions know the numbers of iterations, which costs loops a counter.
    """

    counts = False

    def enters(self, equation: JaxprEqn, position: Position) -> bool:
        """Whether to evaluate the programs of an equation, which is open, one equation at a time."""
        return False

    def given(self, jaxpr: Jaxpr, values: Sequence[jax.Array], position: Position, records: Records) -> None:
        """Called with the constants and inputs of a program."""

    def bind(self, equation: JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates an equation that is not entered."""
        return compat.bind_equation(equation, values)

    def made(
        self,
        equation: JaxprEqn,
        values: list[jax.Array],
        outs: Sequence[jax.Array],
        position: Position,
        records: Records,
    ) -> None:
        """Called after each equation, with its operands and its results."""

    def ends(self, position: Position) -> None:
        """Called at the end of a program, and before each program inside it."""

    def holds(self, jaxpr: AnyJaxpr, values: Sequence[jax.Array]) -> Any:
        """Evaluates the condition of a `while_loop`."""
        return compat.eval_jaxpr(jaxpr, *values)[0]

    def of_iteration(self, records: Records) -> Records:
        """Returns the records of one `while_loop` iteration that are combined by `or` over all: bool scalars."""
        return {}

    def add(self, records: Records, inner: Records) -> None:
        """Adds the records of the programs that an equation holds to those of its program."""
        records.update(inner)

    def evaluate(
        self, jaxpr: AnyJaxpr, values: Sequence[jax.Array], position: Position = OUTERMOST
    ) -> tuple[list[jax.Array], Records]:
        """Evaluates a jaxpr, closed or without constants; returns its results and the records."""
        records: Records = {}
        outs = self._evaluate(jaxpr, values, position, records)
        self.ends(position)
        return outs, records

    def _evaluate(
        self, jaxpr: AnyJaxpr, values: Sequence[jax.Array], position: Position, records: Records
    ) -> list[jax.Array]:
        program, consts = compat.open_jaxpr(jaxpr)
        self.given(program, (*consts, *values), position, records)

        def step(equation: JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
            with compat.equation_context(equation):
                if structure_of(equation).is_open and self.enters(equation, position):
                    outs = self._enter(equation, operands, position, records)
                else:
                    outs = self.bind(equation, operands)
                self.made(equation, operands, outs, position, records)
            return outs

        return interpret(jaxpr, values, step)

    def _enter(
        self, equation: JaxprEqn, values: list[jax.Array], position: Position, records: Records
    ) -> list[jax.Array]:
        kind, programs = structure_of(equation)
        if kind == "call" and not _shardings_of(equation):
            return self._evaluate(programs[0][0], values, position.inside(equation), records)
        self.ends(position)
        outs, inner = _RULES[kind](self, equation, values, position)
        self.add(records, inner)
        return outs


def _shardings_of(equation: JaxprEqn) -> dict[str, Any]:
    # The shardings that a nested jit specifies.
    names = [name for name in ("in_shardings", "out_shardings") if name in equation.params]
    found = {name: compat.jit_shardings(equation.params, name) for name in names}
    return {name: shardings for name, shardings in found.items() if shardings is not None}


Results = tuple[list[Any], Records]


def _jit(self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position) -> Results:
    params = equation.params

    def inside(*values: jax.Array) -> Results:
        return self.evaluate(params["jaxpr"], values, position.inside(equation))

    # Instead of the jit equation: same name, options and shardings; its second result is free.
    inside.__name__ = inside.__qualname__ = params["name"]
    options = {**compat.jit_options(params), **_shardings_of(equation)}
    if "out_shardings" in options:
        options["out_shardings"] = (list(options["out_shardings"]), None)
    outs, records = jax.jit(inside, **options)(*values)
    return outs, records


def _cond(self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position) -> Results:
    branches = equation.params["branches"]
    axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))
    inner, shapes = position.inside(equation), {}
    for branch in branches:
        evaluate = functools.partial(self.evaluate, branch, position=inner)
        shapes.update(jax.eval_shape(lambda *xs, evaluate=evaluate: evaluate(xs)[1], *values[1:]))

    def inside(branch: Any, *values: jax.Array) -> Any:
        outs, records = self.evaluate(branch, values, inner)
        nothing = {k: jax.tree.map(_nothing, shape) for k, shape in shapes.items() if k not in records}
        return outs, jax.tree.map(lambda value: compat.vary_over(axes, value), {**nothing, **records})

    # `switch` and not `cond`: it takes any number of branches, and clamps the index as the equation did.
    outs, records = jax.lax.switch(
        jnp.asarray(values[0], jnp.int32),
        [functools.partial(inside, branch) for branch in branches],
        *values[1:],
    )
    return outs, records


def _remat(self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position) -> Results:
    params = dict(equation.params)
    jaxpr, tree = params.pop("jaxpr"), None

    def inside(iterations: Any, *values: jax.Array) -> list[jax.Array]:
        nonlocal tree
        outs, records = self.evaluate(
            jaxpr, values, replace(position.inside(equation), iterations=iterations)
        )
        leaves, tree = jax.tree.flatten(records)
        return [*outs, *leaves]

    # Binds the primitive, because jax.checkpoint has no argument that says whether this is already a backward pass.
    closed, consts = compat.constants_to_inputs(jax.make_jaxpr(inside)(position.iterations, *values))
    outs = compat.remat_p.bind(
        *consts, *position.iterations, *values, jaxpr=compat.open_jaxpr(closed)[0], **params
    )
    count = len(equation.outvars)
    return list(outs[:count]), jax.tree.unflatten(tree, outs[count:])


def _shard_map(
    self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position
) -> Results:
    params = equation.params
    axes = compat.shard_map_axes(params)
    varying = frozenset(axes) if params["check_vma"] else frozenset()

    def inside(iterations: Any, *values: jax.Array) -> Any:
        there = replace(position.inside(equation), iterations=iterations)
        outs, records = self.evaluate(params["jaxpr"], values, there)
        # Each device returns its own records along a new axis.
        return outs, jax.tree.map(lambda value: compat.vary_over(varying, jnp.asarray(value))[None], records)

    outs, records = jax.shard_map(
        inside,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(position.iterations, *values)
    return outs, records


def _scan(self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position) -> Results:
    params, loop = equation.params, loop_of(equation, values)

    def step(state: Any, x: Any) -> Any:
        i, carry = state
        there = position.inside(equation, *(() if i is None else (loop.number(i),)))
        outs, records = self.evaluate(loop.body, [*loop.consts, *carry, *x], there)
        return (None if i is None else i + 1, outs[: len(carry)]), (outs[len(carry) :], records)

    options = {"_split_transpose": True} if params.get("_split_transpose") else {}
    (_, carry), (ys, records) = jax.lax.scan(
        step,
        (jnp.int32(0) if self.counts else None, loop.init),
        loop.xs,
        length=loop.length,
        reverse=loop.reverse,
        unroll=params["unroll"],
        **options,
    )
    return [*carry, *ys], records


def _while(self: Evaluator, equation: JaxprEqn, values: Sequence[jax.Array], position: Position) -> Results:
    loop = loop_of(equation, values)

    def iterate(i: Any, carry: Sequence[jax.Array]) -> Results:
        there = position.inside(equation, *(() if i is None else loop.iteration(i, carry)))
        outs, records = self.evaluate(loop.body, [*loop.consts, *carry], there)
        return outs, self.of_iteration(records)

    counter = jnp.int32(0) if self.counts else None
    shapes = jax.eval_shape(lambda carry: iterate(counter, carry)[1], loop.init)
    axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))
    none = {label: compat.vary_over(axes, jnp.zeros((), bool)) for label in shapes}
    is_batched = compat.open_jaxpr(loop.condition)[0].outvars[0].aval.shape != ()

    def goes_on(carry: Sequence[jax.Array]) -> Any:
        # A bool for each element if vmap has batched it: the loop goes on while any of them does.
        return self.holds(loop.condition, [*loop.condition_consts, *carry])

    def condition(state: Any) -> Any:
        return jnp.any(goes_on(state[2]))

    def body(state: Any) -> Any:
        i, held, carry = state
        outs, records = iterate(i, carry)
        if is_batched:  # only then, because the condition may have effects
            outs = where_it_goes_on(goes_on(carry), outs, carry)
        held = {label: compat.vary_over(axes, held[label] | jnp.any(records[label])) for label in held}
        return None if i is None else i + 1, held, outs

    _, held, carry = jax.lax.while_loop(condition, body, (counter, none, loop.init))
    return list(carry), held


def where_it_goes_on(predicate: jax.Array, new: Sequence[Any], old: Sequence[Any]) -> list[jax.Array]:
    """Selects the carry after an iteration of a while loop: after vmap the predicate has one value per element."""
    if not predicate.ndim:
        return list(new)
    chosen = [jnp.expand_dims(predicate, tuple(range(predicate.ndim, after.ndim))) for after in new]
    return [jnp.where(*three) for three in zip(chosen, new, old, strict=True)]


def _nothing(shape: Any) -> jax.Array:
    return jnp.full(shape.shape, jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


_RULES: Mapping[str, Callable[..., Results]] = {
    "call": _jit, "remat": _remat, "cond": _cond, "scan": _scan, "while": _while, "shard_map": _shard_map,
}  # fmt: skip


FAILED = "failed"


class Tester(Evaluator):
    """Evaluates a program in which subclasses test values; its one record, `FAILED`, says whether a test failed."""

    def failed(
        self, jaxpr: AnyJaxpr, values: Sequence[jax.Array], position: Position = OUTERMOST
    ) -> tuple[list[Any], Any]:
        """Evaluates a program; returns its results, and whether a test failed: a bool scalar."""
        outs, records = self.evaluate(jaxpr, values, position)
        return outs, records.get(FAILED, jnp.zeros((), bool))

    def fail_if(self, records: Records, failed: jax.Array) -> None:
        """Adds a test, which failed if any element of a bool array holds."""
        failed = jnp.any(failed)
        records[FAILED] = records[FAILED] | failed if FAILED in records else failed

    def add(self, records: Records, inner: Records) -> None:
        for failed in inner.values():
            self.fail_if(records, failed)

    def of_iteration(self, records: Records) -> Records:
        return records


_DEBUGGING = {"debug_callback", "debug_print"}
_CALLS = {"io_callback", call_p.name}


class NotRepeatableError(Exception):
    """A program calls a host function whose results it uses and which a second run must not call again."""


def is_only_effect(equation: JaxprEqn) -> bool:
    """Whether an equation only has an effect on the host: a tap, a print, a callback without results."""
    name = equation.primitive.name
    return equation.primitive is tap_p or name in _DEBUGGING or (name in _CALLS and not equation.outvars)


class Silent(Evaluator):
    """Evaluates a program without its effects: taps, checks, prints and callbacks without results do nothing.

    Attributes:
        callbacks: names and lines of the `pure_callback`s, which are called.
    """

    def __init__(self) -> None:
        """Makes the evaluator."""
        self.callbacks: list[str] = []

    def enters(self, equation: JaxprEqn, position: Position) -> bool:
        return _is_loud(equation)

    def bind(self, equation: JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates an equation without its effects.

        Raises:
            NotRepeatableError: the equation uses the results of a callback that may have side effects.
        """
        if is_only_effect(equation):
            return list(values)[: len(equation.outvars)]
        if structure_of(equation).is_open and _is_loud(equation):  # from an evaluator that does not enter it
            return self._enter(equation, list(values), OUTERMOST, {})
        if equation.primitive is read_cell_p:
            return now(**equation.params)
        name = equation.primitive.name
        if name in _CALLS or name == "pure_callback":
            line = first_user_line(compat.equation_frames(equation))
            call = f"{name} at {line}" if line else name
            if name in _CALLS:
                raise NotRepeatableError(call)
            self.callbacks.append(call)
        return compat.bind_equation(equation, values)

    def holds(self, jaxpr: AnyJaxpr, values: Sequence[jax.Array]) -> Any:
        return self.evaluate(jaxpr, values)[0][0]


def _is_loud(equation: JaxprEqn) -> bool:
    if equation.primitive.name in {tap_p.name, read_cell_p.name, "pure_callback", *_DEBUGGING, *_CALLS}:
        return True
    programs = [program for program, _ in structure_of(equation).programs]
    if equation.primitive.name == "while":
        programs.append(equation.params["cond_jaxpr"])
    return any(_is_loud(inner) for program in programs for inner in compat.open_jaxpr(program)[0].eqns)
