"""Tests whether the results of a step are finite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcallback.api.nonfinite.watcher import is_inexact


def any_not_finite(results: Any) -> Any:
    """Whether any element of any result is not finite: a bool scalar."""
    return jnp.any(failed_groups(results, several=True))


def failed_groups(results: Any, *, several: bool) -> Any:
    """Tests the results in one pass: bool [group]."""
    failed = [
        jnp.logical_not(_all_finite([leaf for _, leaf in group]))
        for group in groups_of(results, several=several)
    ]
    return jnp.stack(failed) if failed else jnp.zeros((0,), bool)


def _all_finite(leaves: Sequence[Any]) -> Any:
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(leaf) for leaf in leaves])
    return jnp.all(jnp.all(finite, axis=0)) if finite.ndim else finite  # XLA:CPU vectorizes over the columns


def groups_of(results: Any, *, several: bool) -> list[list[tuple[Any, Any]]]:
    """The results that can be NaN, with their paths, in groups that are tested together.

    XLA:CPU takes about a microsecond for each reduction. Arrays on several devices may be divided differently, so they
    are tested one by one.
    """
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(results)[0]:
        if is_inexact(leaf):
            groups.setdefault(path if several else leaf.shape, []).append((path, leaf))
    return list(groups.values())
