"""Primitives that reduce arrays where they are: the test whether they are finite, and their statistics.

On CPUs a native handler reads each array once. Elsewhere they are the reductions of `jax.numpy` in this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat

STATISTICS = ("mean", "std", "min", "max", "norm", "zeros", "nonfinite")
"""The names of the results of `statistics_p`, in order."""

# ---- The reductions of jax.numpy -------------------------------------------------------------------------------------


def reduce_not_finite(*arrays: Any, groups: tuple[int, ...]) -> list[Any]:
    """As `not_finite`; arrays of a group have the same shape, so that one reduction tests all of them."""
    failed = []
    for group in range(max(groups, default=-1) + 1):
        members = [array for array, number in zip(arrays, groups, strict=True) if number == group]
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, members))
        # XLA:CPU vectorizes over the columns.
        failed.append(jnp.logical_not(jnp.all(jnp.all(finite, axis=0)) if finite.ndim else finite))
    return [jnp.stack(failed)]


def reduce_statistics(value: Any) -> list[Any]:
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


def _sum(value: Any) -> Any:
    # The first axes alone first: XLA's code for the CPU has vector instructions only for that order.
    return jnp.sum(jnp.sum(value, axis=tuple(range(value.ndim - 1)))) if value.ndim > 1 else jnp.sum(value)


def _mean(value: Any) -> Any:
    return _sum(value) / value.size


# ---- The primitives --------------------------------------------------------------------------------------------------

not_finite_p = Primitive("not_finite")
not_finite_p.multiple_results = True

statistics_p = Primitive("statistics")
statistics_p.multiple_results = True


def not_finite(arrays: Sequence[Any], groups: Sequence[int]) -> Any:
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


def statistics(value: Any) -> dict[str, Any]:
    """Returns the seven statistics of an array of float32 or float64 that has elements: float32 scalars by name."""
    return dict(zip(STATISTICS, statistics_p.bind(value), strict=True))


def _not_finite_avals(*avals: Any, groups: tuple[int, ...]) -> list[Any]:
    return compat.results_that_vary_as(avals, [jax.core.ShapedArray((max(groups) + 1,), np.dtype(np.bool_))])


def _statistics_avals(aval: Any) -> list[Any]:
    return compat.results_that_vary_as(
        [aval], [jax.core.ShapedArray((), np.dtype(np.float32))] * len(STATISTICS)
    )


def _define(primitive: Primitive, avals: Callable[..., Any], reference: Callable[..., list[Any]]) -> None:
    def batch(args: Any, dims: Any, **params: Any) -> Any:
        outs = jax.vmap(functools.partial(reference, **params), in_axes=list(dims))(*args)
        return outs, [0] * len(outs)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        outs = primitive.bind(*primals, **params)
        return outs, [compat.zero_tangent(out) for out in outs]

    primitive.def_abstract_eval(avals)
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(primitive.bind, **params))(*args))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch


_define(not_finite_p, _not_finite_avals, reduce_not_finite)
_define(statistics_p, _statistics_avals, reduce_statistics)
# Lowering is registered in hostcallback.lowering, which knows the transports.
