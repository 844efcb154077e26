"""Puts numbers and numpy arrays on the device without loss: JAX wraps or refuses integers of more than 32 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WIDE = np.dtype(np.int64), np.dtype(np.uint64)


def wide_dtype(value: Any) -> np.dtype[Any] | None:
    """Returns the dtype that keeps the integers of a value, where JAX's own choice does not.

    It is an integer dtype of 64 bits. Without `jax_enable_x64` JAX has none for new arrays, so a step of 3e9 would
    arrive as a negative number. An array that has such a dtype keeps it in every program.

    Args:
        value: anything; what is no Python integer, and no array or scalar of numpy, needs no other dtype.

    Raises:
        OverflowError: a Python integer has more than 64 bits.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if _fits(value, value, jax.dtypes.canonicalize_dtype(np.int64)):
            return None
        found = next((dtype for dtype in _WIDE if _fits(value, value, dtype)), None)
        if found is None:
            raise OverflowError(f"the integer {value!r:.80} has more than 64 bits")
        return found
    if not isinstance(value, np.ndarray | np.generic) or value.dtype not in _WIDE or not value.size:
        return None
    canonical = jax.dtypes.canonicalize_dtype(value.dtype)
    fits = canonical == value.dtype or _fits(int(value.min()), int(value.max()), canonical)
    return None if fits else value.dtype


def _fits(least: int, most: int, dtype: Any) -> bool:
    bounds = np.iinfo(dtype)
    return int(bounds.min) <= least and most <= int(bounds.max)


def to_array(value: Any) -> Any:
    """Returns a number or an array of numpy as an array of JAX with the same integers.

    Raises:
        OverflowError: a Python integer has more than 64 bits.
    """
    dtype = wide_dtype(value)
    if dtype is None:
        return jnp.asarray(value)
    with jax.enable_x64(True):
        return jnp.asarray(value, dtype)
