"""Compares two arrays element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hostcallback.receiver.taplog.convert.numpy_dtypes import plain_array
from hostcallback.receiver.wire.dtypes import Array


class Tolerance(NamedTuple):
    """Elements are equal if |a - b| <= absolute + relative * |b|, as in numpy.isclose.

    Applies to floats and complex numbers; integers, booleans and keys must be identical.
    """

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The difference of two arrays of one shape and dtype.

    Attributes:
        index: of the first differing element.
        max_absolute: largest |a - b|; NaN if one of two elements is a NaN.
        max_relative: largest |a - b| / |b|.
        count: number of differing elements.
    """

    index: tuple[int, ...]
    max_absolute: float
    max_relative: float
    count: int


def array_difference(a: Array, b: Array, tolerance: Tolerance) -> ArrayDifference | None:
    """Compares two arrays of one shape and dtype; None if they are equal. NaNs are equal, and so are -0 and 0."""
    if a.tobytes() == b.tobytes():
        return None
    shape = a.shape
    a, b = plain_array(a).reshape(-1), plain_array(b).reshape(-1)
    with np.errstate(all="ignore"):
        different, absolute = (_inexact if a.dtype.kind in "fc" else _exact)(a, b, tolerance)
        if not different.any():
            return None
        absolute = absolute[different]
        relative = absolute / np.abs(
            b[different].astype(np.complex128 if b.dtype.kind == "c" else np.float64)
        )
    first = np.unravel_index(int(different.argmax()), shape)
    return ArrayDifference(
        tuple(int(place) for place in first), float(absolute.max()), float(relative.max()), len(absolute)
    )


def _inexact(a: Array, b: Array, tolerance: Tolerance) -> tuple[Array, Array]:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    absolute = np.abs(a - b)
    allowed = tolerance.absolute + tolerance.relative * np.abs(b)
    # An infinity equals only itself, regardless of the tolerance.
    alike |= np.isfinite(a) & np.isfinite(b) & (absolute <= allowed)
    return ~alike, absolute


def _exact(a: Array, b: Array, tolerance: Tolerance) -> tuple[Array, Array]:
    # The distance of two 64-bit integers may need 64 bits: unsigned arithmetic does not overflow.
    low, high = np.minimum(a, b), np.maximum(a, b)
    return a != b, (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
