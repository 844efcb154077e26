"""Converts arrays to dtypes that other tools know."""

from __future__ import annotations

import numpy as np

from hostcallback.receiver.wire.dtypes import Array


def plain_array(array: Array) -> Array:
    """Converts to a dtype of numpy's own: bfloat16, float8 and float4 become float32, int4 and the like (u)int8.
    The shape stays, and no value changes.
    """
    array = np.asarray(array)
    name = array.dtype.name
    if hasattr(np, name):
        return array
    return array.astype(
        np.uint8 if name.startswith("uint") else np.int8 if name.startswith("int") else np.float32
    )
