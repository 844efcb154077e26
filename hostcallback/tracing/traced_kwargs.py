"""Refuses traced values as keyword arguments of a tap, with the cure."""

from __future__ import annotations

from typing import Any

import jax


def check_kwargs(kwargs: dict[str, Any], name: str, tap: str) -> None:
    """Raises TypeError if a value, or a leaf of one, is traced.

    Args:
        kwargs: keyword arguments for the sink, which stay on the host.
        name: the tap's.
        tap: its name and source line, for the error.
    """
    for key, value in kwargs.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"the keyword argument {key!r} of {name} is a traced value, {value!r}, and keyword arguments "
                "stay on the host: put it into the tapped pytree, such as id_tap(tap_func, {'x': x, 'step': step}) "
                f"(in the tap {tap})"
            )
