"""`watch_nonfinite`: finds the operation that made a NaN or an infinite value out of finite ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.instrument import instrumented
from hostcallback.api.nonfinite.operation import Operation, selector
from hostcallback.api.nonfinite.rerun import Rerun
from hostcallback.api.nonfinite.watcher import Watcher
from hostcallback.api.public import public
from hostcallback.tracing.source_line import user_source_line

P = ParamSpec("P")
R = TypeVar("R")

Mode = Literal["rerun", "every"]

RERUN = "__hostcallback_rerun__"
"""Attribute of a function that is watched by its results."""


@public
def watch_nonfinite(
    fun: Callable[P, R],
    *,
    where: str | Callable[[Operation], bool] | None = None,
    inputs: bool = True,
    mode: Mode | None = None,
) -> Callable[P, R]:
    """Returns `fun` with a check that reports the operation that made a NaN or an infinite value: `NonFiniteError`.

    The error is a `CheckError`, raised like those of `hcb.check`: by `hcb.barrier_wait` or the end of the receiver, in
    a `TapFunctionException`, or according to the receiver's `on_error`. There is one error per operation, the first
    failure first. `disable_checks("watch_nonfinite")` turns the reports off.

    A jitted `fun` that is called outside of traces runs as it is, plus one test of its results. Only if that fails, the
    call is run again on its inputs, in the next call or in `barrier_wait`, with a check of each operation
    (`mode="rerun"`; docs/checks.md has what this keeps in memory). Otherwise each operation is checked as it runs
    (`mode="every"`), and the rest of this text applies to both.

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
        mode: `"rerun"`, `"every"`, or None for `"rerun"` where `fun` is a jitted function (`jax.jit(step)`) that is
            called outside of traces, and `"every"` elsewhere. With `"rerun"`, `fun` is compiled by `jax.jit`.
        inputs: whether to check the arguments first. They are reported as `input x['y'][0]`.

    Returns:
        A function with the signature of `fun`, which works with and without `jit`, `grad`, `vmap` and `scan`.

    Raises:
        TypeError: `fun` is not callable, or `where` has another type.
        ValueError: `mode` is another text.

    Example:
        step = hcb.watch_nonfinite(jax.jit(train_step, donate_argnums=0))
    """
    _check(fun, mode)
    selects = selector(where)
    static = compat.static_arguments(fun)
    if mode is None and static is not None:
        mode = "rerun"
    rerun = None
    if mode == "rerun":
        donated = compat.donated_arguments(fun)
        rerun = Rerun(fun, selects, inputs=inputs, static=static or ((), ()), donated=donated)

    @functools.wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        value: R
        if rerun is not None and compat.outside_traces():
            value = rerun(args, kwargs)
        else:
            value = instrumented(fun, args, kwargs, Watcher(selects), inputs=inputs)
        return value

    if rerun is not None:
        watched.__dict__[RERUN] = rerun
    return watched


def _check(fun: object, mode: str | None) -> None:
    if not callable(fun):
        raise TypeError(
            f"hcb.watch_nonfinite takes a function, got {type(fun).__name__} {fun!r}: watch_nonfinite(f)(x), not "
            f"watch_nonfinite(f(x)), at {user_source_line()}"
        )
    if mode not in (None, "rerun", "every"):
        raise ValueError(
            f"watch_nonfinite's mode is {mode!r}, expected 'rerun', 'every' or None, at {user_source_line()}"
        )
