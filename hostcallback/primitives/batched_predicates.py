"""Masks the taps in branches and loops that vmap runs for all elements, so that only those send that take part.

If vmap batches the predicate of a `cond`, JAX runs all branches for all elements, and selects. If it batches the
condition of a `while_loop`, JAX runs the body until the last element has ended, and keeps the values of those that have
ended before. The rules here take the place of JAX's for programs with taps: they give every tap and call in there an
operand more, the predicate, a boolean scalar for each element. JAX's own rules then batch it like any operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import cond_p, custom_jvp_call_p, custom_vjp_call_p, jit_p, scan_p, while_p
from hostcallback._jax_compat.types import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var
from hostcallback.primitives.call import call_p, masked_call_p
from hostcallback.primitives.effects import CallEffect, TapEffect
from hostcallback.primitives.tap import bind_where, is_float0, jvp_without_tangents, tap_p


class Where(NamedTuple):
    """The elements of a vmap for which the taps and calls of a program run.

    Attributes:
        mask: a boolean scalar, traced.
        ends_loops: whether its loops end where `mask` does not hold. They must if it has calls: those return zeros
            there, by which a loop may never end.
    """

    mask: jax.Array
    ends_loops: bool = False


def evaluate_where(where: Where, program: AnyJaxpr, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates a jaxpr whose taps and calls run only for elements where the mask is true.

    Raises:
        NotImplementedError: a tap or a call is in an equation that holds a program and has no rule here.
    """
    jaxpr, consts = compat.open_jaxpr(program)
    env: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        rule = _rule_of(equation, where, jaxpr)
        with compat.equation_context(equation):
            outs = (
                compat.bind_equation(equation, operands) if rule is None else rule(equation, where, operands)
            )
        env.update(zip(equation.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _rule_of(equation: JaxprEqn, where: Where, jaxpr: Any) -> Callable[..., Any] | None:
    rule = _inline if equation.primitive.name in compat.INLINE_CALLS else _RULES.get(equation.primitive)
    if compat.has_effect(equation, TapEffect):
        return rule or _refuse
    if not where.ends_loops or rule is None:
        return None
    alone = jaxpr.replace(eqns=[equation])
    return rule if any(compat.equations_of([alone], (while_p,))) else None


def _refuse(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    raise NotImplementedError(
        f"a tap or callback is in {equation.primitive.name}, in a branch or loop whose predicate differs between the "
        "elements of a vmap: JAX would run it for all of them, also for those that do not take part. Take the tap out "
        "of it, or use jax.lax.map in place of jax.vmap, which runs each element by itself"
    )


def _tap(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    return bind_where(where.mask, values, equation.params)


def _call(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    return masked_call_p.bind(where.mask, *values, **equation.params)


def _masked_call(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    return masked_call_p.bind(where.mask & values[0], *values[1:], **equation.params)


def _inline(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    return evaluate_where(where, equation.params["call_jaxpr"], values)


def _jit(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = equation.params
    shardings = {name: compat.jit_shardings(params, name) for name in ("in_shardings", "out_shardings")}
    if shardings == dict.fromkeys(shardings):
        return evaluate_where(where, params["jaxpr"], values)
    inside = _inside(where, params["jaxpr"])
    inside.__name__ = inside.__qualname__ = params["name"]
    options = compat.jit_options(params)
    if (taken := shardings["in_shardings"]) is not None:
        options["in_shardings"] = (None, *taken)
    if (made := shardings["out_shardings"]) is not None:
        options["out_shardings"] = list(made)
    return jax.jit(inside, **options)(where.mask, *values)


def _inside(where: Where, jaxpr: AnyJaxpr) -> Any:
    # What evaluates the jaxpr, given the mask before its operands, since the mask here may be of an outer program.
    def inside(mask: jax.Array, *values: jax.Array) -> Any:
        return evaluate_where(where._replace(mask=mask), jaxpr, values)

    return inside


def _cond(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = equation.params
    branches = tuple(_with_mask(where, branch) for branch in params["branches"])
    return cond_p.bind(values[0], where.mask, *values[1:], **{**params, "branches": branches})


def _with_mask(where: Where, closed: ClosedJaxpr) -> Any:
    # The closed jaxpr with a mask as its first input.
    return compat.closed_jaxpr(_inside(where, closed), [jax.typeof(where.mask), *closed.in_avals])


def _scan(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = equation.params
    consts, init, xs = compat.scan_groups(params, values)

    def step(carry: Any, x: Any) -> Any:
        outs = evaluate_where(where, params["jaxpr"], [*consts, *carry, *x])
        return outs[: len(init)], outs[len(init) :]

    options = {"_split_transpose": True} if params.get("_split_transpose") else {}
    carry, ys = jax.lax.scan(
        step, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"], **options
    )
    return [*carry, *ys]


def _while(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition = params["cond_jaxpr"]

    def going_on(mask: jax.Array, *values: jax.Array) -> Any:
        holds = evaluate_where(where._replace(mask=mask), condition, values)
        return [holds[0] & mask] if where.ends_loops else holds

    changed = {
        "cond_jaxpr": compat.closed_jaxpr(going_on, [jax.typeof(where.mask), *condition.in_avals]),
        "cond_nconsts": first + 1,
        "body_jaxpr": _with_mask(where, params["body_jaxpr"]),
        "body_nconsts": second - first + 1,
    }
    operands = [where.mask, *values[:first], where.mask, *values[first:second], *values[second:]]
    return while_p.bind(*operands, **{**params, **changed})


def _remat(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = dict(equation.params)
    inside = _inside(where, params.pop("jaxpr"))
    # Binds the primitive, because jax.checkpoint has no argument that says whether this is already a backward pass.
    closed, consts = compat.constants_to_inputs(jax.make_jaxpr(inside)(where.mask, *values))
    return compat.remat_p.bind(*consts, where.mask, *values, jaxpr=compat.open_jaxpr(closed)[0], **params)


def _shard_map(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    params = equation.params
    return jax.shard_map(
        _inside(where, params["jaxpr"]),
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(compat.shard_map_axes(params)),
        check_vma=params["check_vma"],
    )(where.mask, *values)


def _custom_jvp(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    primal: jax.custom_jvp[Any] = jax.custom_jvp(_inside(where, equation.params["call_jaxpr"]))

    @primal.defjvp
    def rule(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        def differentiated(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
            return jax.jvp(_original(equation), primals, tangents)

        return _function_where(where._replace(mask=primals[0]), differentiated, primals[1:], tangents[1:])

    return primal(where.mask, *values)


def _custom_vjp(equation: JaxprEqn, where: Where, values: Sequence[jax.Array]) -> Any:
    primal: jax.custom_vjp[Any] = jax.custom_vjp(_inside(where, equation.params["call_jaxpr"]))

    def forward(mask: jax.Array, *values: jax.Array) -> Any:
        def differentiated(*values: jax.Array) -> Any:
            return jax.vjp(_original(equation), *values)

        outs, pullback = _function_where(where._replace(mask=mask), differentiated, *values)
        return outs, (mask, pullback)

    def backward(residuals: Any, cotangents: Any) -> Any:
        mask, pullback = residuals
        is_array = [not is_float0(ct) for ct in cotangents]

        def pull(*arrays: jax.Array) -> Any:
            left = iter(arrays)
            whole = [next(left) if a else ct for ct, a in zip(cotangents, is_array, strict=True)]
            return [None if is_float0(ct) else ct for ct in pullback(whole)]

        arrays = [ct for ct, a in zip(cotangents, is_array, strict=True) if a]
        return (None, *_function_where(where._replace(mask=mask), pull, *arrays))

    primal.defvjp(forward, backward)
    return primal(where.mask, *values)


def _original(equation: JaxprEqn) -> Callable[..., list[Any]]:
    return lambda *values: compat.bind_equation(equation, values)


def _function_where(where: Where, function: Callable[..., Any], *args: Any) -> Any:
    # As `evaluate_where`, for a Python function.
    with compat.no_equation_context():
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = evaluate_where(where, closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


_RULES: dict[Primitive, Callable[..., Any]] = {
    tap_p: _tap,
    call_p: _call,
    masked_call_p: _masked_call,
    jit_p: _jit,
    cond_p: _cond,
    scan_p: _scan,
    while_p: _while,
    compat.remat_p: _remat,
    compat.shard_map_p: _shard_map,
    custom_jvp_call_p: _custom_jvp,
    custom_vjp_call_p: _custom_vjp,
}


def runs_for_all_elements(primitive: Primitive) -> None:
    """Leaves equations of a primitive as they are, in a branch that some elements of a vmap do not take."""
    _RULES[primitive] = lambda equation, where, values: compat.bind_equation(equation, values)


# ---- Batching --------------------------------------------------------------------------------------------------------


def _mask_branches(batch: Any) -> Callable[..., Any]:
    @functools.wraps(batch)
    def rule(
        axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], *, branches: Any, **params: Any
    ) -> Any:
        tapped, calls = (
            any(compat.has_effect(branch, effect) for branch in branches)
            for effect in (TapEffect, CallEffect)
        )
        # The index of a branch for a platform is equal for all elements, and JAX's rule makes it so.
        if not tapped or dims[0] is None or "branches_platforms" in params:
            return batch(axis, args, dims, branches=branches, **params)

        def masked(number: int, branch: ClosedJaxpr, index: Any, *values: jax.Array) -> Any:
            return evaluate_where(Where(index == number, calls), branch, values)

        avals = [compat.aval_of_element(axis, dims[0], args[0]), *branches[0].in_avals]
        with_index = tuple(
            compat.closed_jaxpr(functools.partial(masked, number, branch), avals)
            for number, branch in enumerate(branches)
        )
        return batch(axis, [args[0], *args], [dims[0], *dims], branches=with_index, **params)

    return rule


def _mask_loops(batch: Any) -> Callable[..., Any]:
    @functools.wraps(batch)
    def rule(axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> Any:
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        tapped, calls = (
            compat.has_effect(condition, effect) or compat.has_effect(body, effect)
            for effect in (TapEffect, CallEffect)
        )
        # The predicate of a loop that this rule batched before, for another vmap, has dimensions. It masks already.
        refused = compat.has_ordered_io_effect(condition) or compat.has_ordered_io_effect(body)
        if not tapped or refused or condition.out_avals[0].shape:
            return batch(axis, args, dims, **params)
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        if not _has_batched_predicate(axis, dims[:first], dims[first:second], dims[second:], condition, body):
            return batch(axis, args, dims, **params)

        # The loop carries the predicate. So the body has its mask, and the condition, which may have taps too, is
        # evaluated in the body, once for each step of each element. (JAX evaluates it twice, and changes elements that
        # have ended if it has ordered effects: 0.8 to 0.12.)
        def step(*values: jax.Array) -> Any:
            consts, going_on, carry = values[:second], values[second], values[second + 1 :]
            where = Where(going_on, calls)
            moved = evaluate_where(where, body, [*consts[first:], *carry])
            return [*evaluate_where(where, condition, [*consts[:first], *moved]), *moved]

        carried = [condition.out_avals[0], *body.out_avals]
        consts_in = [*condition.in_avals[:first], *body.in_avals[: second - first]]
        changed = {
            "cond_jaxpr": compat.closed_jaxpr(lambda going_on, *carry: [going_on], carried),
            "cond_nconsts": 0,
            "body_jaxpr": compat.closed_jaxpr(step, [*consts_in, *carried]),
            "body_nconsts": second,
        }
        batched, (dim,) = compat.batch_jaxpr(condition, axis, (*dims[:first], *dims[second:]))
        (going_on,) = compat.eval_jaxpr(batched, *args[:first], *args[second:])
        args = (*args[:second], going_on, *args[second:])
        outs, out_dims = batch(axis, args, [*dims[:second], dim, *dims[second:]], **{**params, **changed})
        return outs[1:], out_dims[1:]

    return rule


def _has_batched_predicate(
    axis: Any, cond_consts: Any, body_consts: Any, init: Any, condition: ClosedJaxpr, body: ClosedJaxpr
) -> bool:
    # As JAX's rule finds it: what the body makes of batched values is batched in its next step.
    def dims_of(batched: Sequence[bool]) -> tuple[int | None, ...]:
        return tuple(0 if is_batched else None for is_batched in batched)

    of_cond, of_body, carry = ([dim is not None for dim in dims] for dims in (cond_consts, body_consts, init))
    while True:
        _, outs = compat.batch_jaxpr(body, axis, dims_of([*of_body, *carry]))
        moved = [before or dim is not None for before, dim in zip(carry, outs, strict=True)]
        if moved == carry:
            break
        carry = moved
    _, (dim,) = compat.batch_jaxpr(condition, axis, dims_of([*of_cond, *carry]))
    return dim is not None


batching.fancy_primitive_batchers[cond_p] = _mask_branches(batching.fancy_primitive_batchers[cond_p])
batching.fancy_primitive_batchers[while_p] = _mask_loops(batching.fancy_primitive_batchers[while_p])


any_lane_p = Primitive("any_lane")
"""Of a boolean scalar: itself; under vmap: whether it holds for any element, one value for all."""

select_lanes_p = Primitive("select_lanes")
"""Of a boolean scalar and two values of a shape: the second; under vmap: the third where the boolean does not hold."""


def any_lane(holds: jax.Array) -> Any:
    """Whether a boolean scalar holds for any element of the vmaps around it."""
    return any_lane_p.bind(holds)


def select_lanes(holds: jax.Array, new: Any, old: Any) -> Any:
    """Returns the tree `new`, under vmap with the leaves of `old` for elements for which `holds` is false."""
    return unused_keys(
        jax.tree.map(
            lambda new, old: select_lanes_p.bind(holds, jnp.asarray(new), jnp.asarray(old)),
            unused_keys(new),
            unused_keys(old),
        )
    )


def unused_keys(tree: Any) -> Any:
    """Returns the tree with typed keys that count as unused for `jax_debug_key_reuse`.

    JAX takes keys for used that go through a primitive of another package, or through a custom derivative. So it does
    not find keys that are used again in the next step of a loop.
    """

    def unused(leaf: Any) -> Any:
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        return jax.random.clone(leaf) if is_key else leaf

    return jax.tree.map(unused, tree)


def _any_batch(args: Sequence[jax.Array], dims: Sequence[int | None]) -> Any:
    (holds,), (dim,) = args, dims
    # Bound again, for a vmap around this one.
    return any_lane_p.bind(jnp.any(holds, axis=dim)), None


def _select_batch(args: Sequence[jax.Array], dims: Sequence[int | None]) -> Any:
    holds, new, old = args
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    new, old = (_batch_first(x, d, size) for x, d in zip((new, old), dims[1:], strict=True))
    if dims[0] is None:
        return select_lanes_p.bind(holds, new, old), 0
    holds = jnp.moveaxis(holds, dims[0], 0)
    return jnp.where(holds.reshape(holds.shape + (1,) * (new.ndim - holds.ndim)), new, old), 0


def _batch_first(value: jax.Array, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)


def _select_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    holds, new, old = primals
    out = select_lanes_p.bind(holds, new, old)
    if all(type(t) is ad.Zero for t in tangents[1:]):
        return out, compat.zero_tangent(out)
    moved, kept = map(ad.instantiate_zeros, tangents[1:])
    return out, select_lanes_p.bind(holds, moved, kept)


any_lane_p.def_abstract_eval(lambda holds: holds)
any_lane_p.def_impl(lambda holds: holds)
ad.primitive_jvps[any_lane_p] = functools.partial(jvp_without_tangents, any_lane_p)
batching.primitive_batchers[any_lane_p] = _any_batch
compat.register_lowering(any_lane_p, lambda ctx, holds: [holds])
select_lanes_p.def_abstract_eval(lambda holds, new, old: new)
select_lanes_p.def_impl(lambda holds, new, old: new)
ad.primitive_jvps[select_lanes_p] = _select_jvp
batching.primitive_batchers[select_lanes_p] = _select_batch
compat.register_lowering(select_lanes_p, lambda ctx, holds, new, old: [new])
