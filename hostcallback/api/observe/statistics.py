"""Statistics of one value, reduced on its device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.primitives import reductions
from hostcallback.tracing.source_line import user_source_line

HISTOGRAM_EXPONENTS = range(-40, 24)
"""The bins of `histogram`: bin i counts magnitudes from 2**(i - 40) up to twice that; the outer bins have the rest."""

DEFAULT = reductions.STATISTICS
STATISTICS = (*DEFAULT, "histogram")


def check_statistics(what: Any) -> tuple[str, ...] | None:
    """Returns the names of statistics; None for the value itself.

    Raises:
        ValueError: a name is none of a statistic.
        TypeError: `what` is neither a text nor a sequence of texts.
    """
    if isinstance(what, str):
        if what == "value":
            return None
        what = DEFAULT if what == "statistics" else (what,)
    if not isinstance(what, Sequence) or not all(isinstance(name, str) for name in what) or not what:
        raise TypeError(
            f"hcb.observe: what is {what!r}, expected 'value', 'statistics', or a list of "
            f"{', '.join(STATISTICS)}, at {user_source_line()}"
        )
    for name in what:
        if name not in STATISTICS:
            raise ValueError(
                f"hcb.observe: what has {name!r}, expected 'value', 'statistics', or a list of "
                f"{', '.join(STATISTICS)}, at {user_source_line()}"
            )
    return tuple(dict.fromkeys(what))


def can_measure(aval: Any) -> bool:
    """Whether a value of that type is an array of numbers that has elements."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(aval, jax.core.ShapedArray) or dtype is None:
        return False
    real = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return bool(real) and 0 not in aval.shape


def measure(value: Any, names: tuple[str, ...] | None) -> Any:
    """Returns what is sent of a value: itself, or a dict of float32 scalars (the histogram is int32 of 64 bins)."""
    value = jax.lax.stop_gradient(value)
    if names is None:
        return value
    if jnp.issubdtype(value.dtype, np.complexfloating):
        value = jnp.abs(value)
    if value.dtype not in (np.float32, np.float64):
        value = value.astype(np.float32)
    measured = reductions.statistics(value) if set(names) & set(DEFAULT) else {}
    return OrderedDict((name, measured[name] if name in measured else _histogram(value)) for name in names)


def _histogram(value: Any) -> Any:
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(value), value, 0))
    low, count = HISTOGRAM_EXPONENTS.start, len(HISTOGRAM_EXPONENTS)
    bins = jnp.clip(exponent - 1 - low, 0, count - 1)
    counted = jnp.isfinite(value) & (value != 0)
    return jnp.zeros(count, np.int32).at[bins.ravel()].add(counted.ravel().astype(np.int32))
