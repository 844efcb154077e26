"""Evaluates a whole program equation by equation, also in its loops, branches and calls, while it is traced again.

This is for programs that JAX is about to lower, which nothing differentiates or batches any more: functions with custom
derivatives are calls, and a checkpoint is one with a barrier. `structure_of` is the one table of JAX's primitives that
hold programs; whatever else holds programs (custom_root, pallas_call, ...) is one operation.
`Silent` leaves out the effects of a program that runs a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import Literal
from hostcallback.primitives.call import call_p
from hostcallback.primitives.tap import tap_p
from hostcallback.tracing.source_line import first_user_line

Records = dict[str, Any]
"""What was measured, by label. A scan adds a leading axis of iterations to each array, a shard_map one of devices."""

CALLS = {
    "jit", "pjit", "remat2", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call", *compat.INLINE_CALLS,
}  # fmt: skip


class Structure(NamedTuple):
    """The programs that an equation holds.

    Attributes:
        kind: "call", "remat", "cond", "scan", "while" or "shard_map"; "other" if they cannot be evaluated one equation
            at a time.
        programs: each with the operands of the equation that are its inputs, in order; empty where there is no such
            order. Of a while loop the body only.
    """

    kind: str
    programs: Sequence[tuple[Any, list[Any]]]


def structure_of(equation: Any) -> Structure | None:
    """The programs that an equation holds; None if it holds none."""
    params, operands, name = equation.params, list(equation.invars), equation.primitive.name
    if name == "while":
        return Structure("while", [(params["body_jaxpr"], operands[params["cond_nconsts"] :])])
    if name == "cond":
        return Structure("cond", [(branch, operands[1:]) for branch in params["branches"]])
    found = [params[key] for key in ("jaxpr", "call_jaxpr") if hasattr(params.get(key), "eqns")]
    if name in ("scan", "shard_map") and found:
        return Structure(name, [(found[0], operands)])
    if name in CALLS and found:
        is_remat = name in ("remat2", "remat", "checkpoint")
        return Structure("remat" if is_remat else "call", [(found[0], operands)])
    if found:
        return Structure("other", [(jaxpr, []) for jaxpr in found])
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else [value])]
    inner: list[tuple[Any, list[Any]]] = [(value, []) for value in values if hasattr(value, "eqns")]
    return Structure("other", inner) if inner else None


class Loop(NamedTuple):
    """A scan or a while loop: what an iteration takes.

    Attributes:
        body: the program of an iteration: of the constants, the carry, and the elements of `xs`.
        consts: the constants of the body.
        init: the first carry.
        xs: what a scan is over.
        length: the number of iterations; None of a while loop.
        reverse: whether a scan begins with the last element.
        condition: the program that says whether a while loop goes on, of its constants and the carry; None of a scan.
        condition_consts: its constants.
    """

    body: Any
    consts: list[Any]
    init: list[Any]
    xs: list[Any]
    length: int | None
    reverse: bool
    condition: Any
    condition_consts: list[Any]

    def number(self, step: Any) -> Any:
        """The number of the iteration that runs after `step` others."""
        return self.length - 1 - step if self.length is not None and self.reverse else step


def loop_of(equation: Any, operands: Sequence[Any]) -> Loop:
    """Splits a scan or while loop with these operands into its parts."""
    params = equation.params
    if equation.primitive.name == "scan":
        consts, init, xs = compat.scan_groups(params, operands)
        return Loop(params["jaxpr"], consts, init, xs, params["length"], params["reverse"], None, [])
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, consts, init = list(operands[:first]), list(operands[first:second]), list(operands[second:])
    return Loop(params["body_jaxpr"], consts, init, [], None, False, params["cond_jaxpr"], of_condition)


@dataclass(frozen=True)
class Place:
    """The position of a program: the equations around it, outermost first.

    Attributes:
        equations: the equations around it, outermost first.
        iterations: the number of the current iteration of each loop around it, outermost first: int32 scalars; only
            for evaluators that count them.
    """

    equations: tuple[Any, ...] = ()
    iterations: tuple[Any, ...] = ()

    def inside(self, equation: Any, *iterations: Any) -> Place:
        """Returns the position of a program inside an equation of this program."""
        return Place((*self.equations, equation), (*self.iterations, *iterations))


class Evaluator:
    """Evaluates a program; subclasses say which equations to enter, and see the values. The thread that lowers.

    Attributes:
        counts: whether places know the numbers of iterations, which costs loops a counter.
    """

    counts = False

    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        """Whether to evaluate the programs of an equation one equation at a time."""
        return False

    def given(self, jaxpr: Any, values: Sequence[Any], place: Place, records: Records) -> None:
        """Called with the constants and inputs of a program."""

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an equation that is not entered."""
        return compat.bind_equation(equation, values)

    def made(
        self,
        jaxpr: Any,
        equation: Any,
        values: Sequence[Any],
        outs: Sequence[Any],
        place: Place,
        records: Records,
    ) -> None:
        """Called after each equation, with its operands and its results."""

    def ends(self, place: Place) -> None:
        """Called at the end of a program, and before each program inside it."""

    def holds(self, jaxpr: Any, values: Sequence[Any]) -> Any:
        """Evaluates the condition of a `while_loop`."""
        return compat.eval_jaxpr(jaxpr, *values)[0]

    def of_iteration(self, records: Records) -> Records:
        """Returns the records of one `while_loop` iteration that are combined by `or` over all: bool scalars."""
        return {}

    def evaluate(self, jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Records]:
        """Evaluates a jaxpr, closed or without constants; returns its results and the records."""
        records: Records = {}
        outs = self._evaluate(jaxpr, values, place, records)
        self.ends(place)
        return outs, records

    def _evaluate(self, jaxpr: Any, values: Sequence[Any], place: Place, records: Records) -> list[Any]:
        jaxpr, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        self.given(jaxpr, (*consts, *values), place, records)
        last = last_uses(jaxpr)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for number, equation in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in equation.invars]
            with compat.equation_context(equation):
                if self.enters(jaxpr, number, equation, place):
                    outs = self._enter(equation, operands, place, records)
                else:
                    outs = self.bind(equation, operands)
                self.made(jaxpr, equation, operands, outs, place, records)
            env.update(zip(equation.outvars, outs, strict=True))
            for variable in last.get(number, ()):
                env.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _enter(self, equation: Any, values: list[Any], place: Place, records: Records) -> list[Any]:
        structure = structure_of(equation)
        assert structure is not None
        if structure.kind == "call" and not _has_shardings(equation):
            return self._evaluate(structure.programs[0][0], values, place.inside(equation), records)
        self.ends(place)
        outs, inner = _RULES[structure.kind](self, equation, values, place)
        records.update(inner)
        return outs


def last_uses(jaxpr: Any) -> Mapping[int, list[Any]]:
    """Returns, by equation number, the variables whose last use is that equation."""
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update({atom: number for atom in equation.invars if not isinstance(atom, Literal)})
        last.update(dict.fromkeys(equation.outvars, number))
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    result: dict[int, list[Any]] = {}
    for variable, number in last.items():
        if variable not in kept:
            result.setdefault(number, []).append(variable)
    return result


def _has_shardings(equation: Any) -> bool:
    params = equation.params
    return any(
        name in params and compat.jit_shardings(params, name) is not None
        for name in ("in_shardings", "out_shardings")
    )


Results = tuple[list[Any], Records]


def _jit(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    params = equation.params

    def inside(*values: Any) -> Results:
        return self.evaluate(params["jaxpr"], values, place.inside(equation))

    # In the place of the jit equation: same name, options and shardings; its second result is free.
    inside.__name__ = inside.__qualname__ = params["name"]
    options = compat.jit_options(params)
    if (shardings := compat.jit_shardings(params, "in_shardings")) is not None:
        options["in_shardings"] = shardings
    if (shardings := compat.jit_shardings(params, "out_shardings")) is not None:
        options["out_shardings"] = (list(shardings), None)
    outs, records = jax.jit(inside, **options)(*values)
    return outs, records


def _cond(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    branches = equation.params["branches"]
    axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))
    inner, shapes = place.inside(equation), {}
    for branch in branches:
        evaluate = functools.partial(self.evaluate, branch, place=inner)
        shapes.update(jax.eval_shape(lambda *xs, evaluate=evaluate: evaluate(xs)[1], *values[1:]))

    def inside(branch: Any, *values: Any) -> Any:
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


def _remat(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    params = dict(equation.params)
    jaxpr, tree = params.pop("jaxpr"), None

    def inside(iterations: Any, *values: Any) -> Any:
        nonlocal tree
        outs, records = self.evaluate(jaxpr, values, replace(place.inside(equation), iterations=iterations))
        leaves, tree = jax.tree.flatten(records)
        return [*outs, *leaves]

    # Binds the primitive, because jax.checkpoint has no argument that says whether this is already a backward pass.
    closed, consts = compat.constants_to_inputs(jax.make_jaxpr(inside)(place.iterations, *values))
    outs = compat.remat_p.bind(
        *consts, *place.iterations, *values, jaxpr=compat.open_jaxpr(closed)[0], **params
    )
    count = len(equation.outvars)
    return list(outs[:count]), jax.tree.unflatten(tree, outs[count:])


def _shard_map(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    params = equation.params
    axes = compat.shard_map_axes(params)
    varying = frozenset(axes) if params["check_vma"] else frozenset()

    def inside(iterations: Any, *values: Any) -> Any:
        there = replace(place.inside(equation), iterations=iterations)
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
    )(place.iterations, *values)
    return outs, records


def _scan(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    params, loop = equation.params, loop_of(equation, values)

    def step(state: Any, x: Any) -> Any:
        i, carry = state
        there = place.inside(equation, *(() if i is None else (loop.number(i),)))
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


def _while(self: Evaluator, equation: Any, values: Sequence[Any], place: Place) -> Results:
    loop = loop_of(equation, values)

    def iterate(i: Any, carry: Sequence[Any]) -> Results:
        there = place.inside(equation, *(() if i is None else (i,)))
        outs, records = self.evaluate(loop.body, [*loop.consts, *carry], there)
        return outs, self.of_iteration(records)

    counter = jnp.int32(0) if self.counts else None
    shapes = jax.eval_shape(lambda carry: iterate(counter, carry)[1], loop.init)
    axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))
    none = {label: compat.vary_over(axes, jnp.zeros((), bool)) for label in shapes}

    def goes_on(carry: Sequence[Any]) -> Any:
        # A bool for each element if vmap has batched it: the loop goes on while any of them does.
        return self.holds(loop.condition, [*loop.condition_consts, *carry])

    def condition(state: Any) -> Any:
        return jnp.any(goes_on(state[2]))

    def body(state: Any) -> Any:
        i, held, carry = state
        outs, records = iterate(i, carry)
        outs = where_it_goes_on(goes_on(carry), outs, carry)
        held = {label: compat.vary_over(axes, held[label] | jnp.any(records[label])) for label in held}
        return None if i is None else i + 1, held, outs

    _, held, carry = jax.lax.while_loop(condition, body, (counter, none, loop.init))
    return list(carry), held


def where_it_goes_on(predicate: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Selects the carry after an iteration of a while loop: after vmap the predicate has one value per element."""
    if not predicate.ndim:
        return list(new)
    chosen = [jnp.expand_dims(predicate, tuple(range(predicate.ndim, after.ndim))) for after in new]
    return [jnp.where(*three) for three in zip(chosen, new, old, strict=True)]


def _nothing(shape: Any) -> Any:
    return jnp.full(shape.shape, jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


_RULES: Mapping[str, Callable[..., Results]] = {
    "call": _jit, "remat": _remat, "cond": _cond, "scan": _scan, "while": _while, "shard_map": _shard_map,
}  # fmt: skip


_DEBUGGING = {"debug_callback", "debug_print"}
_CALLS = {"io_callback", call_p.name}


class NotRepeatableError(Exception):
    """A program calls a host function whose results it uses and which a second run must not call again."""


def silently(equation: Any, values: Sequence[Any], callbacks: list[str]) -> list[Any]:
    """Evaluates an equation; taps, checks, prints and callbacks without results do nothing.

    Adds the name and line of a `pure_callback`, which is called, to `callbacks`.

    Raises:
        NotRepeatableError: the equation uses the results of a callback that may have side effects.
    """
    name = equation.primitive.name
    if equation.primitive is tap_p:
        return list(values)
    if name in _DEBUGGING or (name in _CALLS and not equation.outvars):
        return []
    if name in _CALLS or name == "pure_callback":
        line = first_user_line(compat.equation_frames(equation))
        call = f"{name} at {line}" if line else name
        if name in _CALLS:
            raise NotRepeatableError(call)
        callbacks.append(call)
    return compat.bind_equation(equation, values)


class Silent(Evaluator):
    """Evaluates a program under a trace without its effects; see `silently`.

    Attributes:
        callbacks: names and lines of the `pure_callback`s, which are called.
    """

    def __init__(self) -> None:
        """Makes the evaluator."""
        self.callbacks: list[str] = []

    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        structure = structure_of(equation)
        return structure is not None and structure.kind != "other" and _is_loud(equation)

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        return silently(equation, values, self.callbacks)


def _is_loud(equation: Any) -> bool:
    name = equation.primitive.name
    if equation.primitive is tap_p or name in _DEBUGGING or name in _CALLS or name == "pure_callback":
        return True
    structure = structure_of(equation)
    programs = structure.programs if structure else ()
    return any(_is_loud(inner) for program, _ in programs for inner in compat.open_jaxpr(program)[0].eqns)
