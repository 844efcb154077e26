"""The visitor that checks each operation of a program, and the messages about those that fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.operation import Operation, scope_of
from hostcallback.api.nonfinite.silence import silently
from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.jaxpr_rewriter import Mark, Place
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.nonfinite import Watched
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.source_line import SourceLine, first_user_line
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


# ---- The checks ------------------------------------------------------------------------------------------------------


class Watcher:
    """Visitor of a program: the mark of a value is true if the value is not finite. One message reports all values."""

    def __init__(
        self, selects: Callable[[Operation], bool], rerun_of: str | None = None, reports: Any = None
    ) -> None:
        """Makes the visitor.

        Args:
            selects: whether to check an operation.
            reports: whether to report what it finds, a bool scalar; None for True.
            rerun_of: the name of the watched step if the program is a second run of it. The program's place then has
                the number of the call as its first iteration, and its taps are left out.
        """
        self._selects = selects
        self._rerun_of = rerun_of
        self._reports = reports
        self.callbacks: list[str] = []  # the callbacks of a second run, with their lines
        self._pending: list[tuple[Operation, Any, Counts]] = []

    def inner(self) -> Watcher:
        watcher = Watcher(self._selects, self._rerun_of, self._reports)
        watcher.callbacks = self.callbacks
        return watcher

    def flush(self, place: Place) -> None:
        if self._pending:
            operations, made_here, counts = zip(*self._pending, strict=True)
            self._pending.clear()
            report(operations, made_here, counts, place.iterations, cotangent=False)

    def visit(
        self, equation: Any, place: Place, marks: Sequence[Mark], outs: list[Any]
    ) -> tuple[list[Any], list[Mark]]:
        tainted = _any_of(marks)
        if equation.primitive.name in MOVES:
            return outs, [tainted if is_inexact(out) else False for out in outs]
        results = [self._result(equation, place, tainted, out) for out in outs]
        return [value for value, _ in results], [mark for _, mark in results]

    def mark(self, value: Any) -> Mark:
        if not is_inexact(value):
            return False
        if isinstance(value, jax.core.Tracer):
            return count(value)[0]
        # Values on devices of other processes cannot be read at trace time.
        addressable = getattr(value, "is_fully_addressable", True)
        return bool(addressable) and not np.isfinite(np.asarray(value)).all()

    def can_mark(self, aval: Any) -> bool:
        return is_inexact(aval)

    def evaluate(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        if self._rerun_of is None:
            return compat.bind_equation(equation, values)
        return silently(equation, values, self.callbacks)

    def check_input(self, name: str, value: Any, place: Place, line: SourceLine | None) -> tuple[Any, Mark]:
        """Checks an argument of the watched function."""
        if not is_inexact(value):
            return value, False
        dtype = np.dtype(jnp.result_type(value))
        operation = Operation(name, line, "", np.shape(value), dtype, False, self._rerun_of)
        return self._check(value, False, place, operation)

    def _result(self, equation: Any, place: Place, tainted: Mark, out: Any) -> tuple[Any, Mark]:
        if not is_inexact(out):
            return out, False
        operation = _operation(equation, place, out, self._rerun_of)
        return self._check(out, tainted, place, operation) if self._selects(operation) else (out, tainted)

    def _check(self, value: Any, tainted: Mark, place: Place, operation: Operation) -> tuple[Any, Mark]:
        bad, counts = count(value)
        if tainted is not True:
            made_here = bad if tainted is False else jnp.logical_and(bad, jnp.logical_not(tainted))
            if self._reports is not None:
                made_here = jnp.logical_and(made_here, self._reports)
            self._pending.append((operation, made_here, counts))
        return cotangent_check_p.bind(value, *place.iterations, operation=operation), bad


def _operation(equation: Any, place: Place, out: Any, rerun_of: str | None) -> Operation:
    names = [*place.names, str(equation.source_info.name_stack)]
    return Operation(
        equation.primitive.name,
        _line_of(equation, place),
        scope_of(names),
        np.shape(out),
        np.dtype(out.dtype),
        any("transpose(" in name for name in names),
        rerun_of,
    )


def _line_of(equation: Any, place: Place) -> SourceLine | None:
    # The operations within a function of JAX are reported at the user's line that calls the function.
    lines = (first_user_line(compat.equation_frames(e)) for e in (equation, *reversed(place.equations)))
    return next((line for line in lines if line is not None), None)


def is_inexact(value: Any) -> bool:
    """Whether a value, or a type of values, can hold NaN."""
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


def count(value: Any) -> tuple[Any, Counts]:
    """Returns whether any element is not finite, and the numbers of NaN and of infinite elements."""
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


def report(
    operations: Sequence[Operation],
    made_here: Sequence[Any],
    counts: Sequence[Counts],
    iterations: Sequence[Any],
    *,
    cotangent: bool,
    note: str = "",
) -> None:
    """Sends one message if any of the bool scalars `made_here` is true; under vmap, if it is true for any element."""
    failed = functools.reduce(jnp.logical_or, made_here)
    if (
        not isinstance(failed, jax.core.Tracer) and not failed
    ):  # outside of jit the rest would compile a program
        return
    watched = tuple(
        Watched(
            o.primitive,
            o.source_line,
            o.scope,
            o.shape,
            str(o.dtype),
            o.backward or cotangent,
            cotangent,
            o.rerun_of,
            note,
        )
        for o in operations
    )

    # The identity has no file names, because these differ between machines.
    lines = [(w.source_line.module, w.source_line.line) if w.source_line else None for w in watched]
    identity = [
        (w.name, w.scope, w.shape, w.dtype, line, w.rerun_of, w.note)
        for w, line in zip(watched, lines, strict=True)
    ]
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
        bad, counts = count(cotangent)
        report([operation], [bad], [counts], iterations, cotangent=True)
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
