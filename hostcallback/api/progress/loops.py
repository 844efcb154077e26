"""`scan`, `fori_loop` and `while_loop` of `jax.lax`, with a progress bar."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback.api.progress.bar import BarMessages, Progress, chosen
from hostcallback.api.watch.watch import watch_nonfinite
from hostcallback.primitives.paced_loops import as_one_program, run_while, scan_steps
from hostcallback.tracing.source_line import user_source_line


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: bool | str | Progress | None = True,
    watch: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with a progress bar, which moves ten times a second, however fast the steps are.

    The device looks at a clock, not at a number of steps. The loop costs at most a few percent more for steps of a
    microsecond. The last step is always shown. Works under every transformation. Each device of a `shard_map` has a
    bar, a program that the compiler partitions has one; under `vmap` all elements share one. docs/progress.md has more.

    Args:
        f: as in `jax.lax.scan`.
        init: as in `jax.lax.scan`.
        xs: as in `jax.lax.scan`.
        length: as in `jax.lax.scan`.
        reverse: as in `jax.lax.scan`.
        unroll: as in `jax.lax.scan`. With another value than 1, each step asks whether it is time for a message.
        progress: True, the text before the bar, a `Progress`, or False for `jax.lax.scan` itself.
        watch: whether to find the operation, and the iteration, that made the first NaN or infinity, as
            `watch_nonfinite` does; needs `progress=False`.
        **options: other arguments of `jax.lax.scan`.

    Returns:
        The last carry and the stacked outputs.

    Raises:
        ModuleNotFoundError: tqdm, or the library of `Progress.display`, is not installed.
        TypeError: `progress` is something else; or as `jax.lax.scan`.
        ValueError: `watch` and `progress` are set together.

    Example:
        total, _ = hcb.scan(lambda total, value: (total + value, None), jnp.float32(0), x, progress="sum")
    """
    if watch:
        if progress is not False and progress is not None:
            raise ValueError(
                f"hcb.scan(watch=True) shows no bar: add progress=False, at {user_source_line()}"
            )
        return watch_nonfinite(lax.scan)(f, init, xs, length, reverse, unroll, **options)
    bar = chosen(progress)
    steps = None if bar is None else _length(xs, length)
    if bar is None or steps is None:  # with a wrong length, JAX raises
        return lax.scan(f, init, xs, length, reverse, unroll, **options)
    messages = BarMessages(bar, steps)
    return scan_steps(f, init, xs, steps, messages, {"reverse": reverse, "unroll": unroll, **options})


def _length(xs: Any, length: int | None) -> int | None:
    try:
        lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(xs)}
        lengths |= set() if length is None else {operator.index(length)}
    except (TypeError, IndexError, ValueError):
        return None
    return lengths.pop() if len(lengths) == 1 else None


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    progress: bool | str | Progress | None = True,
) -> Any:
    """`jax.lax.fori_loop` with a progress bar; see `scan`.

    The bounds may be traced. Under `vmap`, elements with different bounds have a bar each.

    Args:
        lower: as in `jax.lax.fori_loop`.
        upper: as in `jax.lax.fori_loop`.
        body_fun: as in `jax.lax.fori_loop`.
        init_val: as in `jax.lax.fori_loop`.
        unroll: as in `jax.lax.fori_loop`.
        progress: as in `scan`.

    Returns:
        The value after the last step.

    Raises:
        ModuleNotFoundError: as `scan`.
        TypeError: as `scan`; or as `jax.lax.fori_loop`.

    Example:
        x = hcb.fori_loop(0, 1000, lambda i, x: jnp.cos(x), x, progress="iterate")
    """
    bar = chosen(progress)
    if bar is None:
        return lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)
    try:
        first, last = operator.index(lower), operator.index(upper)
    except (TypeError, jax.errors.JAXTypeError):
        return as_one_program(
            lambda lower, upper, value: _traced_fori_loop(lower, upper, body_fun, value, bar),
            lower,
            upper,
            init_val,
        )
    dtype = jnp.result_type(lower, upper)

    def step(carry: Any, _: Any) -> Any:
        index, value = carry
        return (index + 1, body_fun(index, value)), None

    messages = BarMessages(bar, max(last - first, 0), view=lambda carry, y: (carry[1],))

    def loop(value: Any) -> Any:
        init = (jnp.asarray(lower, dtype), value)
        (_, value), _ = scan_steps(step, init, None, max(last - first, 0), messages, {"unroll": unroll or 1})
        return value

    return as_one_program(loop, init_val)


def _traced_fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any, bar: Progress
) -> Any:
    dtype = jnp.result_type(lower, upper)
    lower, upper = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    messages = BarMessages(bar, jnp.maximum(upper - lower, 0), view=lambda carry: (carry[1],))

    def step(carry: Any) -> Any:
        index, value = carry
        return index + 1, body_fun(index, value)

    return run_while(lambda carry: carry[0] < upper, step, (lower, init_val), messages)[1]


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    progress: bool | str | Progress | None = True,
) -> Any:
    """`jax.lax.while_loop` with a progress bar that counts steps; see `scan`.

    The bar has no end unless `Progress(total=...)` gives one. Under `vmap`, elements that end at different steps have a
    bar each.

    Args:
        cond_fun: as in `jax.lax.while_loop`.
        body_fun: as in `jax.lax.while_loop`.
        init_val: as in `jax.lax.while_loop`.
        progress: as in `scan`.

    Returns:
        The value for which `cond_fun` is false.

    Raises:
        ModuleNotFoundError: as `scan`.
        TypeError: as `scan`; or as `jax.lax.while_loop`.

    Example:
        least = hcb.while_loop(lambda value: value > 1e-6, lambda value: value / 2, 1.0, progress="halve")
    """
    bar = chosen(progress)
    if bar is None:
        return lax.while_loop(cond_fun, body_fun, init_val)
    return run_while(cond_fun, body_fun, init_val, BarMessages(bar, None))
