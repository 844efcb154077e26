"""Primitives that read the host's clock, and arrays where they are: whether they are finite, statistics, copies.

On CPUs a native handler reads each array once. Elsewhere they are the reductions of `jax.numpy` in this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback.primitives.partial_evaluation import read_once_when_recomputed
from hostcallback.primitives.tap import jvp_without_tangents, run_eagerly

STATISTICS = ("mean", "std", "min", "max", "norm", "zeros", "nonfinite")
"""The names of the results of `statistics_p`, in order."""

# ---- The reductions of jax.numpy -------------------------------------------------------------------------------------


def reduce_not_finite(*arrays: jax.Array, groups: tuple[int, ...]) -> list[jax.Array]:
    """As `not_finite`; arrays of a group have the same shape, so that one reduction tests all of them."""
    failed = []
    for group in range(max(groups, default=-1) + 1):
        members = [array for array, number in zip(arrays, groups, strict=True) if number == group]
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, members))
        # XLA:CPU vectorizes over the columns.
        failed.append(jnp.logical_not(jnp.all(jnp.all(finite, axis=0)) if finite.ndim else finite))
    return [jnp.stack(failed)]


def reduce_statistics(value: jax.Array) -> list[jax.Array]:
    """As `statistics`, in the order of `STATISTICS`."""
    mean = _mean(value)
    # XLA:CPU's minimum of more than some thousand elements leaves NaN out (jaxlib 0.10.2).
    nan = jnp.where(jnp.isnan(value).any(), jnp.nan, 0)
    results = (
        mean,
        jnp.sqrt(_mean(jnp.square(value - mean))),
        jnp.min(value) + nan,
        jnp.max(value) + nan,
        jnp.sqrt(_sum(jnp.square(value))),
        _sum((value == 0).astype(np.float32)) / value.size,
        _sum((~jnp.isfinite(value)).astype(np.float32)) / value.size,
    )
    return [result.astype(np.float32) for result in results]


def reduce_share_statistics(value: jax.Array, *, devices: int) -> list[jax.Array]:
    """As `share_statistics`, with the whole in the first row."""
    whole = jnp.stack([*reduce_statistics(value), jnp.float32(value.size)])
    return [jnp.zeros((devices, len(whole)), np.float32).at[0].set(whole)]


def reduce_merged_statistics(rows: Any, *, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """As `merged_statistics`, of rows [devices, values, 8]: for each shape the seven results."""
    mean, std, low, high, norm, zeros, nonfinite, count = jnp.moveaxis(rows, 2, 0)
    is_empty, share = count == 0, count / jnp.sum(count, 0)
    average = jnp.sum(share * mean, 0)
    spread = std**2 + (mean - average) ** 2
    merged = (
        average,
        jnp.sqrt(jnp.sum(jnp.where(is_empty, 0, share * spread), 0)),
        jnp.min(jnp.where(is_empty, jnp.inf, low), 0),
        jnp.max(jnp.where(is_empty, -jnp.inf, high), 0),
        jnp.sqrt(jnp.sum(norm**2, 0)),
        jnp.sum(share * zeros, 0),
        jnp.sum(share * nonfinite, 0),
    )
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = [jnp.split(statistic, ends) for statistic in merged]
    return [part[i].reshape(shape) for i, shape in enumerate(shapes) for part in parts]


def _sum(value: jax.Array) -> jax.Array:
    # The first axes alone first: XLA's code for the CPU has vector instructions only for that order.
    return jnp.sum(jnp.sum(value, axis=tuple(range(value.ndim - 1)))) if value.ndim > 1 else jnp.sum(value)


def _mean(value: jax.Array) -> jax.Array:
    return _sum(value) / value.size


# ---- The primitives --------------------------------------------------------------------------------------------------


def _not_finite_avals(*avals: compat.Aval, groups: tuple[int, ...]) -> list[jax.Array]:
    return compat.results_that_vary_as(avals, [jax.core.ShapedArray((max(groups) + 1,), np.dtype(np.bool_))])


def _statistics_avals(aval: compat.Aval) -> list[jax.Array]:
    return compat.results_that_vary_as(
        [aval], [jax.core.ShapedArray((), np.dtype(np.float32))] * len(STATISTICS)
    )


def _share_statistics_avals(aval: compat.Aval, devices: int) -> list[jax.Array]:
    row = jax.core.ShapedArray((devices, len(STATISTICS) + 1), np.dtype(np.float32))
    return compat.results_that_vary_as([aval], [row])


def _merged_statistics_avals(aval: compat.Aval, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    results = [jax.core.ShapedArray(shape, np.dtype(np.float32)) for shape in shapes for _ in STATISTICS]
    return compat.results_that_vary_as([aval], results)


def _clock_avals(step: Any, *, alike: bool, timed: bool) -> list[jax.Array]:
    return compat.results_that_vary_as([step], [jax.core.ShapedArray((2,), np.dtype(np.uint32))])


def _edge_avals(*avals: Any) -> list[Any]:
    stamp = avals[-1].shape
    made = [
        jax.core.ShapedArray(stamp, np.dtype(np.uint32)),
        jax.core.ShapedArray(stamp[:-1], np.dtype(np.float32)),
    ]
    return [*avals[:-2], *compat.results_that_vary_as(avals, made)]


def _define(
    name: str, avals: Callable[..., Any], reference: Callable[..., list[Any]] | None = None
) -> compat.Primitive:
    primitive = compat.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(run_eagerly, primitive))
    ad.primitive_jvps[primitive] = functools.partial(jvp_without_tangents, primitive)
    if reference is not None:
        batching.primitive_batchers[primitive] = functools.partial(_batch, reference)
    return primitive


def _batch(reference: Callable[..., list[Any]], args: Any, dims: Any, **params: Any) -> Any:
    outs = jax.vmap(functools.partial(reference, **params), in_axes=list(dims))(*args)
    return outs, [0] * len(outs)


def _batch_clock(args: Any, dims: Any, **params: Any) -> Any:
    (step,), (dim,) = args, dims
    return clock_p.bind(jnp.max(step, axis=dim), **params), [None]  # one clock for all elements


clock_p = _define("host_clock", _clock_avals)
"""Takes an integer that changes from reading to reading. Returns a `uint32[2]`: the time in microseconds, which wraps
around after 71 minutes, and the least number of microseconds between two readings that costs little. It has no effect:
a reading that nothing uses is left out. With `alike` the latter is 0 in a program of several devices, which so read
after the same steps; without `timed` the time is 0 there, too, and costs nothing."""
batching.primitive_batchers[clock_p] = _batch_clock
compat.lower_with_devices(clock_p)
# A loop that can be stopped takes the same steps when a checkpoint recomputes it.
read_once_when_recomputed(clock_p, lambda params: params["alike"])
not_finite_p = _define("not_finite", _not_finite_avals, reduce_not_finite)
statistics_p = _define("statistics", _statistics_avals, reduce_statistics)
share_statistics_p = _define("share_statistics", _share_statistics_avals, reduce_share_statistics)
merged_statistics_p = _define("merged_statistics", _merged_statistics_avals, reduce_merged_statistics)
copies_p = _define("copies", lambda *avals: [*avals, *avals], lambda *arrays: [*arrays, *arrays])
edge_p = _define("edge", _edge_avals)
"""Operands: arrays, a stamp, and another one since which to count. Results: the arrays, the stamp of now, the seconds
since the other as a float32. A stamp is a `uint32[2]`: Unix time in nanoseconds, the lower half first. In a
program that the compiler divides among devices they have an axis of these in front."""
# Lowering is registered in hostcallback.lowering, which knows the transports.


# ---- Binding them ----------------------------------------------------------------------------------------------------


def read_clock(step: Any, *, alike: bool = False, timed: bool = True) -> Any:
    """Returns the time and the least interval (see `clock_p`) after all steps before `step`."""
    return clock_p.bind(jnp.asarray(step), alike=alike, timed=timed)[0]


def not_finite(arrays: Sequence[jax.Array], groups: Sequence[int]) -> Any:
    """Tests arrays of floating-point or complex numbers for NaN and infinite elements.

    Args:
        arrays: arrays of any shapes; those of one group have the same shape.
        groups: for each array the number of its group; the numbers are 0 to n - 1.

    Returns:
        bool [n]: whether any element of the group is not finite.
    """
    if not arrays:
        return jnp.zeros((0,), bool)
    return not_finite_p.bind(*arrays, groups=tuple(groups))[0]


def statistics(value: jax.Array) -> dict[str, Any]:
    """Returns the seven statistics of an array of float32 or float64 that has elements: float32 scalars by name."""
    return dict(zip(STATISTICS, statistics_p.bind(value), strict=True))


def share_statistics(value: jax.Array, devices: int) -> Any:
    """Measures an array that the compiler divides among devices; each device measures its shard, without communication.

    Returns:
        float32 [devices, 8], for `merged_statistics`: of each device's share of the array the seven statistics and the
        number of its elements. Of a shard that several devices have, each measures a part.
    """
    return share_statistics_p.bind(value, devices=devices)[0]


def merged_statistics(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the statistics of arrays from those of their shares, by one exchange among the devices for all of them.

    Args:
        rows: for each array a result of `share_statistics`, which may have axes in front, as after a scan.

    Returns:
        As `statistics` for each, of the shape of the axes in front.
    """
    shapes = tuple(one.shape[:-2] for one in rows)
    # Devices first: what they send each other is then in one piece.
    flat = [jnp.moveaxis(one.reshape(-1, *one.shape[-2:]), 1, 0) for one in rows]
    found = merged_statistics_p.bind(jnp.concatenate(flat, axis=1), shapes=shapes)
    count = len(STATISTICS)
    return [dict(zip(STATISTICS, found[i : i + count], strict=True)) for i in range(0, len(found), count)]


def copies(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Copies arrays of any types, on CPUs by one native call.

    Returns:
        The arrays and the copies. The program must go on with the former: they are in the arrays' memory, and come
        after the copies, so that what writes over them needs no further copy.
    """
    outs = copies_p.bind(*arrays) if arrays else []
    return list(outs[: len(arrays)]), list(outs[len(arrays) :])


def edge(arrays: Sequence[jax.Array], after: Any, since: Any) -> tuple[list[jax.Array], Any, Any]:
    """Reads the clock when all arrays are there, and after the reading `after`; what uses the results comes later.

    Returns:
        The arrays, the stamp of the reading (see `edge_p`), and the seconds since the stamp `since`.
    """
    *outs, stamp, seconds = edge_p.bind(*arrays, after, since)
    return outs, stamp, seconds
