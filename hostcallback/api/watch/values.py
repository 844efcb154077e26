"""Values of a walked program: whether they are finite, and texts about them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def numpy_of(value: Any) -> np.ndarray[Any, Any]:
    """A value as NumPy array; keys and references, which are none, as an empty one."""
    return np.asarray(value) if is_plain(value) else np.zeros((), np.int32)


def is_plain(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    return isinstance(value, np.ndarray | np.generic | float | complex | int)


def bad_of(value: Any) -> Any:
    """Which elements of a value are not finite; None if all are."""
    if not is_plain(value):
        return None
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return None
    if array.dtype.name == "bfloat16":  # NumPy takes such numbers one by one
        exponent = np.uint16(0x7F80)
        bad = (array.view(np.uint16) & exponent) == exponent
    else:
        bad = ~np.isfinite(array)
    return bad if bad.any() else None


def first_of(bad: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), np.shape(bad)))


def operands_at(
    operands: Iterable[np.ndarray[Any, Any]], shape: tuple[int, ...], element: tuple[int, ...]
) -> dict[str, str]:
    texts = {}
    for number, operand in enumerate(operands):
        if operand.shape == shape:
            texts[f"operand {number}"] = _text(operand[element])
        elif operand.size == 1:
            texts[f"operand {number}"] = _text(operand.reshape(())[()])
        elif operand.size and operand.dtype.kind not in "OSUV":
            plain = operand.astype(np.complex128 if np.iscomplexobj(operand) else np.float64)
            low, high = (
                (abs(plain).min(), abs(plain).max()) if np.iscomplexobj(plain) else (plain.min(), plain.max())
            )
            dims = ",".join(map(str, operand.shape))
            texts[f"operand {number}"] = f"{operand.dtype}[{dims}] from {low:.6g} to {high:.6g}"
    return texts


def _text(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return f"{number:.6g}" if math.isfinite(number) else str(number)
    return str(value)
