"""`hostcallback.jit`: jax.jit whose taps cost no dispatch time, by discharging the tap effect at its boundary.

Any JAX effect on a program's outermost jaxpr takes every call off JAX's C++ dispatch path. Here the traced
function becomes one effect-free equation, whose lowering makes the token, threads it through the function's
taps and drops it at the end. Within another transformation or trace the function is left as it is, so that
its taps keep their order among the taps around it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from hostcallback import _jax_compat as compat, inflight
from hostcallback.call import call_p
from hostcallback.primitive import TapEffect
from receiver.deferred import urgent as urgent_checks

P = ParamSpec("P")
R = TypeVar("R")

SMALL_BYTES = 4096
"""A result up to this size may be kept to wait on; keeping larger ones would hold the user's memory."""

boundary_p = Primitive("tap_boundary")
boundary_p.multiple_results = True


def _abstract(*avals: Any, closed: Any) -> Any:
    others = {e for e in closed.effects if not isinstance(e, TapEffect)}
    return closed.out_avals, others


def _impl(*args: Any, closed: Any) -> Any:
    return compat.eval_jaxpr(closed, *args)


def _lower(ctx: Any, *args: Any, closed: Any) -> Any:
    return compat.lower_discharged(ctx, closed, args, TapEffect)


boundary_p.def_effectful_abstract_eval(_abstract)
boundary_p.def_impl(_impl)
compat.keep_when_unused(boundary_p)
compat.register_lowering(boundary_p, _lower)


@overload
def jit(fun: Callable[P, R], /, **jax_jit_kwargs: Any) -> Callable[P, R]: ...
@overload
def jit(**jax_jit_kwargs: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(fun: Callable[..., Any] | None = None, /, **jax_jit_kwargs: Any) -> Any:
    """Compiles `fun` as `jax.jit` does, and calls it as fast as if it had no taps.

    Taps under plain `jax.jit` are as correct; each call then costs what JAX charges for an effect (about
    100 us instead of 5).

    Args:
        fun: the function; omitted in the decorator form `@hostcallback.jit(donate_argnums=0)`.
        **jax_jit_kwargs: as `jax.jit` takes them.

    Make it once and call it often, as with a decorator: each `hostcallback.jit(fun)` compiles anew.

    Returns:
        A function with the signature of `fun` and the methods `lower`, `trace`, `eval_shape` and
        `clear_cache` of a jitted function. What `lower().compile()` returns keeps JAX's dispatch cost.
    """
    if fun is None:
        return functools.partial(jit, **jax_jit_kwargs)
    if not callable(fun):
        raise TypeError(f"hostcallback.jit takes a function, got {type(fun).__name__} {fun!r}")
    return _make(fun, jax_jit_kwargs)


class _WithDone:
    """A function's result and an array that is ready when the computation is over."""

    __slots__ = ("done", "out")

    def __init__(self, out: Any, done: Any) -> None:
        self.out = out
        self.done = done


jax.tree_util.register_pytree_node(
    _WithDone, lambda node: ((node.out, node.done), None), lambda _, parts: _WithDone(*parts)
)


def _make(fun: Callable[..., Any], jit_kwargs: dict[str, Any]) -> Callable[..., Any]:
    plain: Any = jax.jit(fun, **jit_kwargs)
    explicit_shardings = jit_kwargs.get("out_shardings") is not None
    if explicit_shardings:
        jit_kwargs = {**jit_kwargs, "out_shardings": _WithDone(jit_kwargs["out_shardings"], None)}
    select: Callable[[Any], Any] = _no_result
    waits = False
    # Where in a result of each structure the small array is that its computation is waited on by.
    noted: dict[Any, tuple[tuple[Any, ...] | None, Callable[[Any], Any]]] = {}

    def select_by_structure(out: Any) -> Any:
        return noted[jax.tree.structure(out)][1](out)

    @functools.wraps(fun)
    def discharged(*args: Any, **kwargs: Any) -> Any:
        nonlocal select, waits
        out, has_taps, has_calls, produced = _discharge(fun, args, kwargs)
        waits = waits or has_calls
        if explicit_shardings:
            return _WithDone(out, np.zeros(0, np.uint8) if has_taps else None)
        path, accessor = _small_result(out, produced) if has_taps else (None, _no_result)
        if accessor is not None:
            known_path, _ = noted.setdefault(jax.tree.structure(out), (path, accessor))
            select = accessor if len(noted) == 1 else select_by_structure
            if path == known_path or not has_taps:
                return out
        return _WithDone(out, np.zeros(0, np.uint8))

    fast: Any = jax.jit(discharged, **jit_kwargs)
    trace_context, eval_trace, array_type = compat.trace_context, compat.eval_trace, compat.ArrayImpl
    this_thread, urgent = inflight.this_thread, urgent_checks

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Every line here is paid by every call: see the row "one hcb.jit call" of the benchmarks.
        if trace_context.trace is not eval_trace:
            return plain(*args, **kwargs)
        if urgent:
            inflight.raise_urgent()
        try:
            out = fast(*args, **kwargs)
        except ValueError as error:
            # What XLA runs at once, and fails, JAX's fast path raises as another type than its other paths do.
            if waits and str(error).startswith("INTERNAL: "):
                raise jax.errors.JaxRuntimeError(str(error)) from None
            raise
        if type(out) is _WithDone:
            done = out.done
            out = out.out
        else:
            done = select(out)
        if type(done) is array_type:
            results = this_thread.results
            results[id(done.sharding)] = done
            if len(results) > inflight.PRUNE_ABOVE:
                inflight.prune(results)
            if waits:
                # See _jax_compat.dispatch_synchronously, which does it where JAX dispatches. Here it can be
                # interrupted.
                done.block_until_ready()
        return out

    def clear_cache() -> None:
        plain.clear_cache()
        fast.clear_cache()

    for name, method in (
        ("lower", plain.lower),
        ("trace", plain.trace),
        ("eval_shape", plain.eval_shape),
        ("clear_cache", clear_cache),
    ):
        setattr(call, name, method)
    return call


def _discharge(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool, bool, set[int]]:
    """Traces `fun` and binds it as one equation.

    Returns:
        Its result, whether it has taps, whether it has calls, and the ids of the result leaves that the equation
        produced.
    """
    # Static arguments arrive as they are; an argument with a traced leaf is a dynamic one.
    parts, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: not _has_tracer(x))
    traced = [i for i, part in enumerate(parts) if isinstance(part, jax.core.Tracer)]
    if not traced and compat.jit_is_disabled():
        return fun(*args, **kwargs), False, False, set()

    def flat_fun(*leaves: Any) -> Any:
        filled = list(parts)
        for i, leaf in zip(traced, leaves, strict=True):
            filled[i] = leaf
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return fun(*inner_args, **inner_kwargs)

    leaves = [parts[i] for i in traced]
    closed, shapes = jax.make_jaxpr(flat_fun, return_shape=True)(*leaves)
    out_tree = jax.tree.structure(shapes)
    if not compat.has_effect(closed, TapEffect) or compat.has_input_effect(closed):
        return jax.tree.unflatten(out_tree, compat.eval_jaxpr(closed, *leaves)), False, False, set()
    closed = compat.discharge_own_refs(closed)
    closed = compat.lower_to_primitives(closed)
    # Constants become operands, so that jax.jit treats them as it treats any function's constants.
    converted, consts = compat.constants_to_inputs(closed)
    outs = boundary_p.bind(*consts, *leaves, closed=converted)
    produced = {id(out) for out in outs}
    # As jax.jit does, hand back an input that is returned unchanged instead of copying it.
    forwarded = dict(zip(map(id, converted.jaxpr.invars), [*consts, *leaves], strict=True))
    outs = [forwarded.get(id(var), out) for var, out in zip(converted.jaxpr.outvars, outs, strict=True)]
    return jax.tree.unflatten(out_tree, outs), True, compat.has_primitive(closed, call_p), produced


def _has_tracer(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def _no_result(out: Any) -> None:
    return None


def _accessor(path: tuple[Any, ...], out: Any) -> Callable[[Any], Any] | None:
    """A function that gets one leaf out of a result like `out` without flattening it; None where there is none."""
    steps: list[Callable[[Any], Any]] = []
    node = out
    for key in path:
        if isinstance(key, SequenceKey):
            steps.append(operator.itemgetter(key.idx))
        elif isinstance(key, DictKey):
            steps.append(operator.itemgetter(key.key))
        elif isinstance(key, GetAttrKey):
            if isinstance(getattr(type(node), key.name, None), property):
                return None  # someone's code, which may warn or do anything at each call
            steps.append(operator.attrgetter(key.name))
        else:
            return None
        node = steps[-1](node)
    if not steps:
        return _itself
    if len(steps) == 1:
        return steps[0]

    def follow(out: Any) -> Any:
        for step in steps:
            out = step(out)
        return out

    return follow


def _itself(out: Any) -> Any:
    return out


def _small_result(out: Any, produced: set[int]) -> tuple[tuple[Any, ...] | None, Callable[[Any], Any] | None]:
    """Path and accessor of a small leaf that the computation made; None, None if there is none to be had."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]:
        aval = jax.typeof(leaf)
        if id(leaf) not in produced or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        if aval.size * aval.dtype.itemsize <= SMALL_BYTES:
            accessor = _accessor(tuple(path), out)
            if accessor is not None and accessor(out) is leaf:
                return tuple(path), accessor
    return None, None
