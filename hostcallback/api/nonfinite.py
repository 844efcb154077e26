"""`watch_nonfinite`: finds the operation that made a NaN or an infinite value out of finite ones."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback.api.public import public
from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.jaxpr_rewriter import Mark, Place, rewrite
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.nonfinite import Watched
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.source_line import SourceLine, first_user_line, user_source_line
from hostcallback.tracing.tap_options import TapOptions

P = ParamSpec("P")
R = TypeVar("R")

# The result has exactly the elements of the operand, so it is finite if and only if the operand is.
MOVES = {
    *(
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "copy_p",
        "expand_dims",
        "name",
        "neg",
        "pvary",
        "reshape",
        "rev",
    ),
    *("sharding_constraint", "squeeze", "stop_gradient", "transpose"),
}


@dataclass(frozen=True)
class Operation:
    """One result of one equation of a watched function.

    Attributes:
        primitive: the name of JAX's primitive, such as `log`.
        source_line: the user's line; None if JAX does not know it.
        scope: the named scopes around it, separated by `/`.
        shape: shape of the result; under vmap, of one element.
        dtype: dtype of the result.
        backward: whether it is part of a backward pass within the watched function, as in `watch_nonfinite(grad(f))`.

    Example:
        step = jax.jit(hcb.watch_nonfinite(train_step, where=lambda operation: operation.primitive == "log"))
    """

    primitive: str
    source_line: SourceLine | None
    scope: str
    shape: tuple[int, ...]
    dtype: Any
    backward: bool


@public
def watch_nonfinite(
    fun: Callable[P, R], *, where: str | Callable[[Operation], bool] | None = None, inputs: bool = True
) -> Callable[P, R]:
    """Returns `fun` with a check of each operation, which reports NaN and infinite results as `NonFiniteError`.

    The error is a `CheckError`, raised like those of `hcb.check`: by `hcb.barrier_wait` or the end of the receiver, in
    a `TapFunctionException`, or according to the receiver's `on_error`. There is one error per operation, the first
    failure first. `disable_checks("watch_nonfinite")` turns the reports off.

    The program goes on with the results and gradients of `fun`. While all values are finite, it sends no messages.
    Operations in `scan`, `while_loop`, `cond`, nested `jit`, `jax.checkpoint`, `shard_map` and functions with custom
    derivatives are watched; operations inside other primitives are not, but the results of these are checked.

    Only an operation with finite operands is reported, so neither operations to which a NaN spreads nor operations
    that pass a mask of `-inf` on are reported.

    `watch_nonfinite(jax.grad(f))` watches the operations of the backward pass too. `jax.grad(watch_nonfinite(f))`
    checks the cotangent of each watched result and reports every one that is not finite; the first one is the origin.
    Under vmap there is one error for the batch. If vmap batches the predicate of a `cond` or a `while_loop`, JAX also
    runs operations that an element alone would not run, and these are watched too.

    `fun` is traced, as by `jax.jit`, so it cannot branch on the values of arrays. Outside of jit it is traced at each
    call. In compiled code XLA may fuse the operations differently, so that the last bits of results differ.

    Args:
        fun: a function of pytrees. Leaves that are not arrays are passed to it unchanged.
        where: the operations to check; None for all. A text is a named scope (`"attention"`,
            `"decoder/attention"`) or, if it ends in `.py`, the end of a file's path (`"model.py"`, `"nets/model.py"`).
            A function gets an `Operation` and returns whether to check it.
        inputs: whether to check the arguments first. They are reported as `input x['y'][0]`.

    Returns:
        A function with the signature of `fun`, which works with and without `jit`, `grad`, `vmap` and `scan`.

    Raises:
        TypeError: `fun` is not callable, or `where` has another type.

    Example:
        step = jax.jit(hcb.watch_nonfinite(jax.grad(loss_of)))
    """
    if not callable(fun):
        raise TypeError(
            f"hcb.watch_nonfinite takes a function, got {type(fun).__name__} {fun!r}: watch_nonfinite(f)(x), not "
            f"watch_nonfinite(f(x)), at {user_source_line()}"
        )
    selects = _selector(where)

    @functools.wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        parts = [part for _, part in paths]
        places = [i for i, part in enumerate(parts) if _is_array(part)]
        results: list[Any] = []
        result_tree: Any = None

        def of_arrays(*arrays: Any) -> list[Any]:
            nonlocal results, result_tree
            filled = list(parts)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            results, result_tree = jax.tree.flatten(fun(*inner_args, **inner_kwargs))
            return [result for result in results if isinstance(result, jax.core.Tracer)]

        arrays = [parts[i] for i in places]
        closed = jax.make_jaxpr(of_arrays)(*arrays)
        marks: list[Mark] = [False] * len(arrays)
        watcher = _Watcher(selects)
        if inputs:
            names = [_name_of_input(fun, paths[i][0]) for i in places]
            checked = [watcher.check_input(*pair) for pair in zip(names, arrays, strict=True)]
            arrays, marks = [value for value, _ in checked], [mark for _, mark in checked]
            watcher.flush(Place())
        outs = iter(rewrite(closed, watcher, arrays, marks, Place())[0])
        filled = [next(outs) if isinstance(result, jax.core.Tracer) else result for result in results]
        value: R = jax.tree.unflatten(result_tree, filled)
        return value

    return watched


def _is_array(value: Any) -> bool:
    return (
        isinstance(value, jax.Array | np.ndarray | np.generic) and getattr(value, "dtype", None) != np.object_
    )


def _name_of_input(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    group, argument, *rest = path
    name = "" if group.idx == 0 else str(argument.key)
    if not name:
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        more = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL] or ["args"]
        count, index = len(positional), argument.idx
        name = positional[index] if index < count else f"{more[0]}[{index - count}]"
    return f"input {name}{jax.tree_util.keystr(tuple(rest))}"


# ---- Which operations ------------------------------------------------------------------------------------------------


def _selector(where: Any) -> Callable[[Operation], bool]:
    if where is None:
        return lambda operation: True
    if callable(where):
        return lambda operation: bool(where(operation))
    if not isinstance(where, str):
        raise TypeError(
            f"watch_nonfinite's where={where!r} is of type {type(where).__name__}, expected None, the name of a scope, "
            f"the end of a file's path such as 'model.py', or a function of an Operation, at {user_source_line()}"
        )
    part = f"/{where.strip('/')}/"
    if where.endswith(".py"):
        return lambda operation: (
            part in f"/{operation.source_line.file if operation.source_line else ''}/"[-len(part) :]
        )
    return lambda operation: part in f"/{operation.scope}/"


_TRANSFORM = re.compile(r"\b[a-z_]+\((?=[^()]*\)|[a-z_]+\()|\)")


def _scope_of(names: Sequence[str]) -> str:
    # JAX wraps the names of transformed scopes: `transpose(jvp(loss))/attention`.
    parts = (_TRANSFORM.sub("", part) for name in names for part in name.split("/"))
    return "/".join(part for part in parts if part)


# ---- The checks ------------------------------------------------------------------------------------------------------


class _Watcher:
    """Visitor of a program: the mark of a value is true if the value is not finite. One message reports all values."""

    def __init__(self, selects: Callable[[Operation], bool]) -> None:
        self._selects = selects
        self._pending: list[tuple[Operation, Any, Counts]] = []

    def inner(self) -> _Watcher:
        return _Watcher(self._selects)

    def flush(self, place: Place) -> None:
        if self._pending:
            operations, made_here, counts = zip(*self._pending, strict=True)
            self._pending.clear()
            _report(operations, made_here, counts, place.iterations, cotangent=False)

    def visit(
        self, equation: Any, place: Place, marks: Sequence[Mark], outs: list[Any]
    ) -> tuple[list[Any], list[Mark]]:
        tainted = _any_of(marks)
        if equation.primitive.name in MOVES:
            return outs, [tainted if _is_inexact(out) else False for out in outs]
        results = [self._result(equation, place, tainted, out) for out in outs]
        return [value for value, _ in results], [mark for _, mark in results]

    def mark(self, value: Any) -> Mark:
        if not _is_inexact(value):
            return False
        if isinstance(value, jax.core.Tracer):
            return _count(value)[0]
        # Values on devices of other processes cannot be read at trace time.
        addressable = getattr(value, "is_fully_addressable", True)
        return bool(addressable) and not np.isfinite(np.asarray(value)).all()

    def can_mark(self, aval: Any) -> bool:
        return _is_inexact(aval)

    def check_input(self, name: str, value: Any) -> tuple[Any, Mark]:
        """Checks an argument of the watched function."""
        if not _is_inexact(value):
            return value, False
        operation = Operation(name, None, "", np.shape(value), np.dtype(jnp.result_type(value)), False)
        return self._check(value, False, Place(), operation)

    def _result(self, equation: Any, place: Place, tainted: Mark, out: Any) -> tuple[Any, Mark]:
        if not _is_inexact(out):
            return out, False
        operation = _operation(equation, place, out)
        return self._check(out, tainted, place, operation) if self._selects(operation) else (out, tainted)

    def _check(self, value: Any, tainted: Mark, place: Place, operation: Operation) -> tuple[Any, Mark]:
        bad, counts = _count(value)
        if tainted is not True:
            made_here = bad if tainted is False else jnp.logical_and(bad, jnp.logical_not(tainted))
            self._pending.append((operation, made_here, counts))
        return cotangent_check_p.bind(value, *place.iterations, operation=operation), bad


def _operation(equation: Any, place: Place, out: Any) -> Operation:
    names = [*place.names, str(equation.source_info.name_stack)]
    return Operation(
        equation.primitive.name,
        _line_of(equation, place),
        _scope_of(names),
        np.shape(out),
        np.dtype(out.dtype),
        any("transpose(" in name for name in names),
    )


def _line_of(equation: Any, place: Place) -> SourceLine | None:
    # The operations within a function of JAX are reported at the user's line that calls the function.
    lines = (first_user_line(compat.equation_frames(e)) for e in (equation, *reversed(place.equations)))
    return next((line for line in lines if line is not None), None)


def _is_inexact(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not _is_reference(value) and bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_reference(value: Any) -> bool:
    aval = value if isinstance(value, jax.core.AbstractValue) else jax.typeof(value)
    return not isinstance(aval, jax.core.ShapedArray)


def _any_of(marks: Sequence[Mark]) -> Mark:
    if any(mark is True for mark in marks):
        return True
    arrays = [mark for mark in marks if mark is not False]
    return functools.reduce(jnp.logical_or, arrays) if arrays else False


# ---- Counts ----------------------------------------------------------------------------------------------------------

Counts = tuple[Any, Any]
"""Numbers of NaN and of infinite elements: int32 scalars."""

SHIFT = 15


def _count(value: Any) -> tuple[Any, Counts]:
    # Counts in one pass, because a pass over the data is the cost of watching: a row of fewer than 2**15 elements has
    # both counts in one number, with the infinite ones shifted by 15 bits.
    value = jnp.asarray(jax.lax.stop_gradient(value))
    axes, size = [], 1
    for axis in reversed(range(value.ndim)):
        size *= value.shape[axis]
        if size >= 1 << SHIFT:
            break
        axes.append(axis)
    nan, inf = jnp.int32(1), jnp.int32(1 << SHIFT)
    kinds = jnp.where(jnp.isfinite(value), jnp.int32(0), jnp.where(jnp.isnan(value), nan, inf))
    rows = jnp.sum(kinds, axis=axes)
    nan_count, inf_count = jnp.sum(rows & (inf - 1)), jnp.sum(rows >> SHIFT)
    return nan_count | inf_count != 0, (nan_count, inf_count)


# ---- Messages --------------------------------------------------------------------------------------------------------


def _report(
    operations: Sequence[Operation],
    made_here: Sequence[Any],
    counts: Sequence[Counts],
    iterations: Sequence[Any],
    *,
    cotangent: bool,
) -> None:
    """Sends one message if any of the bool scalars `made_here` is true; under vmap, if it is true for any element."""
    failed = functools.reduce(jnp.logical_or, made_here)
    if (
        not isinstance(failed, jax.core.Tracer) and not failed
    ):  # outside of jit the rest would compile a program
        return
    watched = tuple(
        Watched(
            o.primitive, o.source_line, o.scope, o.shape, str(o.dtype), o.backward or cotangent, cotangent
        )
        for o in operations
    )

    # The identity has no file names, because these differ between machines.
    lines = [(w.source_line.module, w.source_line.line) if w.source_line else None for w in watched]
    identity = [(w.name, w.scope, w.shape, w.dtype, line) for w, line in zip(watched, lines, strict=True)]
    nan_counts, inf_counts = zip(*counts, strict=True)
    message = (jnp.logical_not(failed), list(made_here), list(nan_counts), list(inf_counts), list(iterations))
    options = TapOptions(
        "watch_nonfinite", tap_tangents=False, sharding="local", kind=tap_kind.NONFINITE,
        params={"operations": [operation.plain() for operation in watched]},
    )  # fmt: skip
    binding = Binding(objects={"operations": watched})
    bind_tap(message, (), {}, binding, identity=("nonfinite", repr(identity)), options=options)


# ---- An identity whose cotangent is checked ---------------------------------------------------------------------

cotangent_check_p = Primitive("watch_cotangent")


def _cotangent_jvp(primals: Any, tangents: Any, *, operation: Operation) -> Any:
    tangent = tangents[0]
    if type(tangent) is not ad.Zero:
        tangent = cotangent_check_p.bind(tangent, *primals[1:], operation=operation)
    return cotangent_check_p.bind(*primals, operation=operation), tangent


def _cotangent_transpose(cotangent: Any, value: Any, *iterations: Any, operation: Operation) -> Any:
    if type(cotangent) is not ad.Zero:
        bad, counts = _count(cotangent)
        _report([operation], [bad], [counts], iterations, cotangent=True)
    return [cotangent, *(None for _ in iterations)]


def _cotangent_batch(args: Any, dims: Any, *, operation: Operation) -> Any:
    iterations = [i if d is None else jnp.max(i, axis=d) for i, d in zip(args[1:], dims[1:], strict=True)]
    return cotangent_check_p.bind(args[0], *iterations, operation=operation), dims[0]


cotangent_check_p.def_abstract_eval(lambda value, *iterations, operation: value)
cotangent_check_p.def_impl(lambda value, *iterations, operation: value)
ad.primitive_jvps[cotangent_check_p] = _cotangent_jvp
ad.primitive_transposes[cotangent_check_p] = _cotangent_transpose
batching.primitive_batchers[cotangent_check_p] = _cotangent_batch
compat.register_lowering(cotangent_check_p, lambda ctx, value, *iterations, operation: [value])
