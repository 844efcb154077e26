"""Tests whether the results of a step are finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hostcallback.api.nonfinite.watcher import is_inexact
from hostcallback.primitives.reductions import not_finite


def any_not_finite(results: Any) -> Any:
    """Whether any element of any result is not finite: a bool scalar."""
    return jnp.any(failed_groups(results, several=True))


def failed_groups(results: Any, *, several: bool) -> Any:
    """Tests the results in one pass: bool [group]."""
    groups = groups_of(results, several=several)
    leaves = [jax.lax.stop_gradient(jnp.asarray(leaf)) for group in groups for _, leaf in group]
    return not_finite(leaves, [number for number, group in enumerate(groups) for _ in group])


def groups_of(results: Any, *, several: bool) -> list[list[tuple[Any, Any]]]:
    """The results that can be NaN, with their paths, in groups that are tested together.

    XLA takes about a microsecond for each reduction where no native handler tests the results. Arrays on several
    devices may be divided differently, so they are tested one by one.
    """
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(results)[0]:
        if is_inexact(leaf):
            groups.setdefault(path if several else leaf.shape, []).append((path, leaf))
    return list(groups.values())
