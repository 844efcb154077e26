"""Evaluates a program equation by equation, also in loops, branches and calls, and passes each result to a visitor.

Each value has a *mark*: False, True or a traced bool scalar. The visitor defines its meaning; this module carries marks
through loops and into and out of calls. Loops and calls are rebuilt with JAX's public functions; other equations that
hold programs (custom_root, pallas_call, ...) are evaluated unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    scan_p,
    while_p,
)
from jax.sharding import PartitionSpec

from hostcallback import _jax_compat as compat

Mark = Any
Results = tuple[list[Any], list[Mark]]


@dataclass(frozen=True)
class Place:
    """The place of an equation in a program.

    Attributes:
        names: the name stacks of the equations around it, outermost first, as JAX prints them.
        iterations: the number of the current iteration of each loop around it, outermost first: int32 scalars.
        equations: the equations around it, outermost first.
    """

    names: tuple[str, ...] = ()
    iterations: tuple[Any, ...] = ()
    equations: tuple[Any, ...] = ()

    def inside(self, equation: Any, *iterations: Any) -> Place:
        """A place in a program that the equation holds; `iterations` are of the loop that it is."""
        names = (*self.names, str(equation.source_info.name_stack))
        return Place(names, (*self.iterations, *iterations), (*self.equations, equation))


class Visitor(Protocol):
    """Sees each result, may replace it, and defines its mark."""

    def evaluate(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an equation that is no loop, branch or call."""

    def visit(self, equation: Any, place: Place, marks: Sequence[Mark], outs: list[Any]) -> Results:
        """Called after an equation was evaluated, with the marks of its operands.

        Returns the values to use as its results, and their marks. For an equation with custom derivatives, `marks` also
        has the marks that its results got inside it.
        """

    def mark(self, value: Any) -> Mark:
        """Returns the mark of a value that no equation made: a constant or a cotangent."""

    def can_mark(self, aval: Any) -> bool:
        """Whether a value of that type may have another mark than False."""

    def inner(self) -> Visitor:
        """Returns a visitor for a separate program within this one, such as the body of a loop."""

    def flush(self, place: Place) -> None:
        """Called at the end of a program and before each program inside it: earlier visits must be complete then."""


def rewrite(
    jaxpr: Any, visitor: Visitor, values: Sequence[Any], marks: Sequence[Mark], place: Place
) -> Results:
    """Evaluates a jaxpr, closed or without constants, on values and their marks; `place` is the jaxpr's own place."""
    own = visitor.inner()
    results = _evaluate_all(jaxpr, own, values, marks, place)
    own.flush(place)
    return results


def _evaluate_all(jaxpr: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    env: dict[Any, tuple[Any, Mark]] = {}

    def read(atom: Any) -> tuple[Any, Mark]:
        return (atom.val, visitor.mark(atom.val)) if isinstance(atom, Literal) else env[atom]

    const_marks = [visitor.mark(const) for const in consts]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env.update(zip(variables, zip([*consts, *values], [*const_marks, *marks], strict=True), strict=True))
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        rule = _rule_of(equation)
        # Before a loop, a branch or a call: what was visited so far must be emitted outside of it, not
        # inside.
        if rule is not _evaluate and rule is not _inline:
            visitor.flush(place)
        with compat.equation_context(equation):
            results = rule(equation, visitor, [v for v, _ in operands], [m for _, m in operands], place)
        env.update(zip(equation.outvars, zip(*results, strict=True), strict=True))
    outs = [read(atom) for atom in jaxpr.outvars]
    return [value for value, _ in outs], [mark for _, mark in outs]


def _rule_of(equation: Any) -> Callable[..., Results]:
    if equation.primitive.name in compat.INLINE_CALLS or _may_be_inlined(equation):
        return _inline
    return _RULES.get(equation.primitive, _evaluate)


def _evaluate(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    return visitor.visit(equation, place, marks, visitor.evaluate(equation, values))


def _may_be_inlined(equation: Any) -> bool:
    # XLA inlines such a call anyway. Outside of a program the jit stays, so that its code is compiled together.
    params = equation.params
    return (
        equation.primitive is jit_p
        and compat.is_staging()
        and compat.jit_shardings(params, "in_shardings") is None
        and compat.jit_shardings(params, "out_shardings") is None
    )


def _inline(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params = equation.params
    jaxpr = params["jaxpr"] if equation.primitive is jit_p else params["call_jaxpr"]
    return _evaluate_all(jaxpr, visitor, values, marks, place.inside(equation))


# ---- Marks that leave a program, as arrays ---------------------------------------------------------------------------


class _Slots:
    """The values that can have marks. Passes their marks as arrays that vary over the same mesh axes."""

    def __init__(self, visitor: Visitor, equation: Any, avals: Sequence[Any]) -> None:
        self._can = [visitor.can_mark(aval) for aval in avals]
        self._axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))

    def pack(self, marks: Sequence[Mark]) -> list[Any]:
        kept = [mark for mark, can in zip(marks, self._can, strict=True) if can]
        return [compat.vary_over(self._axes, jnp.asarray(mark, bool)) for mark in kept]

    def unpack(self, packed: Sequence[Any]) -> list[Mark]:
        left = iter(packed)
        return [next(left) if can else False for can in self._can]

    def nothing(self) -> list[Any]:
        return self.pack([False] * len(self._can))


def _slots_in(visitor: Visitor, equation: Any) -> _Slots:
    return _Slots(visitor, equation, [atom.aval for atom in equation.invars])


def _slots_out(visitor: Visitor, equation: Any) -> _Slots:
    return _Slots(visitor, equation, [var.aval for var in equation.outvars])


# ---- Calls and branches ----------------------------------------------------------------------------------------------


def jit_like(
    params: dict[str, Any], inside: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Jits a function in the place of a jit equation: same name, options and shardings; its second result is free."""
    inside.__name__ = inside.__qualname__ = params["name"]
    options = compat.jit_options(params)
    if (shardings := compat.jit_shardings(params, "in_shardings")) is not None:
        options["in_shardings"] = shardings
    if (shardings := compat.jit_shardings(params, "out_shardings")) is not None:
        options["out_shardings"] = (list(shardings), None)
    return jax.jit(inside, **options)


def _jit(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params, slots = equation.params, _slots_out(visitor, equation)

    def inside(*values: Any) -> Any:
        outs, out_marks = rewrite(params["jaxpr"], visitor, values, marks, place.inside(equation))
        return outs, slots.pack(out_marks)

    outs, packed = jit_like(params, inside)(*values)
    return outs, slots.unpack(packed)


def _cond(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    slots = _slots_out(visitor, equation)

    def inside(branch: Any, *values: Any) -> Any:
        outs, out_marks = rewrite(branch, visitor, values, marks[1:], place.inside(equation))
        return outs, slots.pack(out_marks)

    branches = [functools.partial(inside, branch) for branch in equation.params["branches"]]
    # `switch` and not `cond`: it takes any number of branches, and clamps the index as the equation did.
    outs, packed = jax.lax.switch(jnp.asarray(values[0], np.int32), branches, *values[1:])
    return outs, slots.unpack(packed)


def _remat(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params = dict(equation.params)
    slots_in, slots = _slots_in(visitor, equation), _slots_out(visitor, equation)
    jaxpr = params.pop("jaxpr")

    def inside(iterations: Any, packed: Any, *values: Any) -> Any:
        there = replace(place.inside(equation), iterations=iterations)
        outs, out_marks = rewrite(jaxpr, visitor, values, slots_in.unpack(packed), there)
        return [*outs, *slots.pack(out_marks)]

    operands = (place.iterations, slots_in.pack(marks), *values)
    # Binds the primitive, because jax.checkpoint has no argument that says whether this is already a backward pass.
    closed, consts = compat.constants_to_inputs(jax.make_jaxpr(inside)(*operands))
    outs = compat.remat_p.bind(
        *consts, *jax.tree.leaves(operands), jaxpr=compat.open_jaxpr(closed)[0], **params
    )
    count = len(equation.outvars)
    return list(outs[:count]), slots.unpack(outs[count:])


def _shard_map(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params = equation.params
    slots_in, slots = _slots_in(visitor, equation), _slots_out(visitor, equation)
    axes = compat.shard_map_axes(params)

    def inside(iterations: Any, packed: Any, *values: Any) -> Any:
        there = replace(place.inside(equation), iterations=iterations)
        outs, out_marks = rewrite(params["jaxpr"], visitor, values, slots_in.unpack(packed), there)
        # Each device returns its own mark along a new axis: out_specs must not claim that the marks are equal.
        varying = frozenset(axes) if params["check_vma"] else frozenset()
        return outs, [compat.vary_over(varying, mark)[None] for mark in slots.pack(out_marks)]

    everywhere, one_each = PartitionSpec(), PartitionSpec(axes)
    outs, packed = jax.shard_map(
        inside,
        mesh=params["mesh"],
        in_specs=(everywhere, everywhere, *params["in_specs"]),
        out_specs=(list(params["out_specs"]), one_each),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(place.iterations, slots_in.pack(marks), *values)
    return outs, slots.unpack([jnp.any(mark) for mark in packed])


# ---- Loops -----------------------------------------------------------------------------------------------------------


def _scan(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params = equation.params
    consts, init, xs = compat.scan_groups(params, values)
    const_marks, init_marks, xs_marks = compat.scan_groups(params, marks)
    out_avals, count = [var.aval for var in equation.outvars], len(init)
    carry_slots = _Slots(visitor, equation, out_avals[:count])
    ys_slots = _Slots(visitor, equation, out_avals[count:])

    def step(state: Any, x: Any) -> Any:
        i, carry_marks, ys_marks, carry = state
        iteration = params["length"] - 1 - i if params["reverse"] else i
        body_marks = [*const_marks, *carry_slots.unpack(carry_marks), *xs_marks]
        outs, out_marks = rewrite(
            params["jaxpr"], visitor, [*consts, *carry, *x], body_marks, place.inside(equation, iteration)
        )
        # A stack of results is marked if any of them is.
        seen = map(jnp.logical_or, ys_marks, ys_slots.pack(out_marks[count:]))
        return (i + 1, carry_slots.pack(out_marks[:count]), list(seen), outs[:count]), outs[count:]

    options = {"_split_transpose": True} if params.get("_split_transpose") else {}
    state = (jnp.int32(0), carry_slots.pack(init_marks), ys_slots.nothing(), init)
    (_, carry_marks, ys_marks, carry), ys = jax.lax.scan(
        step,
        state,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **options,
    )
    return [*carry, *ys], [*carry_slots.unpack(carry_marks), *ys_slots.unpack(ys_marks)]


def _while(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    slots = _slots_out(visitor, equation)

    def evaluate(jaxpr: Any, consts: slice, state: Any) -> Results:
        i, carry_marks, carry = state
        inner_marks = [*marks[consts], *slots.unpack(carry_marks)]
        there = place.inside(equation, i)
        return rewrite(jaxpr, visitor, [*values[consts], *carry], inner_marks, there)

    def condition(state: Any) -> Any:
        return evaluate(params["cond_jaxpr"], slice(0, first), state)[0][0]

    def body(state: Any) -> Any:
        carry, carry_marks = evaluate(params["body_jaxpr"], slice(first, second), state)
        return state[0] + 1, slots.pack(carry_marks), carry

    state = (jnp.int32(0), slots.pack(marks[second:]), values[second:])
    _, carry_marks, carry = jax.lax.while_loop(condition, body, state)
    return carry, slots.unpack(carry_marks)


# ---- Custom derivatives ----------------------------------------------------------------------------------------------


def _custom_jvp(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    slots_in, slots = _slots_in(visitor, equation), _slots_out(visitor, equation)
    primal: jax.custom_jvp[Any] = jax.custom_jvp(_primal(equation, visitor, slots_in, slots, place))

    @primal.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        # The user's rule is not rewritten: parts of it run only transposed, where a mark has no meaning.
        outs, out_tangents = jax.jvp(_original(equation), primals[2:], tangents[2:])
        nothing = slots.nothing()
        return (outs, nothing), (out_tangents, [_no_tangent(mark) for mark in nothing])

    outs, packed = primal(place.iterations, slots_in.pack(marks), *values)
    return visitor.visit(equation, place, [*marks, *slots.unpack(packed)], outs)


def _custom_vjp(equation: Any, visitor: Visitor, values: Any, marks: Any, place: Place) -> Results:
    slots_in, slots = _slots_in(visitor, equation), _slots_out(visitor, equation)
    count = len(equation.outvars)
    primal: jax.custom_vjp[Any] = jax.custom_vjp(_primal(equation, visitor, slots_in, slots, place))

    def forward(iterations: Any, packed: Any, *values: Any) -> Any:
        there = replace(place.inside(equation), iterations=iterations)
        (outs, pullback), out_marks = _rewrite_function(
            lambda *xs: jax.vjp(_original(equation), *xs), visitor, values, slots_in.unpack(packed), there
        )
        return (outs, slots.pack(out_marks[:count])), (pullback, iterations)

    def backward(residuals: Any, cotangents: Any) -> Any:
        pullback, iterations = residuals
        there = place.inside(equation)
        there = replace(there, names=(*there.names, "transpose(jvp())"), iterations=iterations)
        is_array = [not _is_float0(ct) for ct in cotangents[0]]

        def pull(*arrays: Any) -> Any:
            left = iter(arrays)
            flat = [next(left) if a else ct for ct, a in zip(cotangents[0], is_array, strict=True)]
            return [None if _is_float0(ct) else ct for ct in pullback(flat)]

        arrays = [ct for ct, a in zip(cotangents[0], is_array, strict=True) if a]
        ct_marks = [visitor.mark(ct) for ct in arrays]
        outs, _ = _rewrite_function(pull, visitor, arrays, ct_marks, there)
        return (None, None, *outs)

    primal.defvjp(forward, backward)
    outs, packed = primal(place.iterations, slots_in.pack(marks), *values)
    return visitor.visit(equation, place, [*marks, *slots.unpack(packed)], outs)


def _primal(
    equation: Any, visitor: Visitor, slots_in: _Slots, slots: _Slots, place: Place
) -> Callable[..., Any]:
    def primal(iterations: Any, packed: Any, *values: Any) -> Any:
        there = replace(place.inside(equation), iterations=iterations)
        jaxpr = equation.params["call_jaxpr"]
        outs, out_marks = rewrite(jaxpr, visitor, values, slots_in.unpack(packed), there)
        return outs, slots.pack(out_marks)

    return primal


def _original(equation: Any) -> Callable[..., list[Any]]:
    return lambda *values: compat.bind_equation(equation, values)


def _rewrite_function(
    function: Callable[..., Any], visitor: Visitor, values: Any, marks: Any, place: Place
) -> tuple[Any, list[Mark]]:
    """Like `rewrite`, for a Python function; returns its result and the marks of the result's leaves."""
    tree: Any = None

    def flat(*values: Any) -> Any:
        nonlocal tree
        leaves, tree = jax.tree.flatten(function(*values))
        return leaves

    with compat.no_equation_context():
        closed = jax.make_jaxpr(flat)(*values)
    outs, out_marks = rewrite(closed, visitor, values, marks, place)
    return jax.tree.unflatten(tree, outs), out_marks


def _no_tangent(value: Any) -> Any:
    return np.zeros(np.shape(value), jax.dtypes.float0)


def _is_float0(value: Any) -> bool:
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


_RULES: dict[Any, Callable[..., Results]] = {
    jit_p: _jit,
    cond_p: _cond,
    compat.remat_p: _remat,
    compat.shard_map_p: _shard_map,
    scan_p: _scan,
    while_p: _while,
    custom_jvp_call_p: _custom_jvp,
    custom_vjp_call_p: _custom_vjp,
}
