"""Runs a function with a check of each operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hostcallback.api.nonfinite.watcher import Watcher
from hostcallback.primitives.jaxpr_rewriter import Mark, Place, rewrite
from hostcallback.tracing.source_line import SourceLine


def instrumented(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    watcher: Watcher,
    *,
    inputs: bool,
    iterations: Sequence[Any] = (),
    line: SourceLine | None = None,
) -> Any:
    """Traces `fun(*args, **kwargs)` and evaluates it for `watcher`; returns what `fun` returns.

    Leaves that are not arrays are passed to `fun` unchanged.

    Args:
        fun: the watched function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        watcher: gets each operation.
        inputs: whether it gets the arguments first.
        iterations: numbers that belong to every operation's place, such as the number of a call: int32 scalars.
        line: the line at which the arguments are reported; None for the one that calls.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    parts = [part for _, part in paths]
    places = [i for i, part in enumerate(parts) if _is_array(part)]
    results: list[Any] = []
    result_tree: Any = None

    def of_arrays(*arrays: Any) -> list[Any]:
        nonlocal results, result_tree
        filled = list(parts)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        results, result_tree = jax.tree.flatten(fun(*inner_args, **inner_kwargs))
        return [result for result in results if isinstance(result, jax.core.Tracer)]

    arrays = [parts[i] for i in places]
    closed = jax.make_jaxpr(of_arrays)(*arrays)
    marks: list[Mark] = [False] * len(arrays)
    place = Place(iterations=tuple(iterations))
    if inputs:
        names = [_name_of_input(fun, paths[i][0]) for i in places]
        checked = [watcher.check_input(*pair, place, line) for pair in zip(names, arrays, strict=True)]
        arrays, marks = [value for value, _ in checked], [mark for _, mark in checked]
        watcher.flush(place)
    outs = iter(rewrite(closed, watcher, arrays, marks, place)[0])
    filled = [next(outs) if isinstance(result, jax.core.Tracer) else result for result in results]
    return jax.tree.unflatten(result_tree, filled)


def _is_array(value: Any) -> bool:
    return (
        isinstance(value, jax.Array | np.ndarray | np.generic) and getattr(value, "dtype", None) != np.object_
    )


def _name_of_input(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    group, argument, *rest = path
    name = "" if group.idx == 0 else str(argument.key)
    if not name:
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        more = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL] or ["args"]
        count, index = len(positional), argument.idx
        name = positional[index] if index < count else f"{more[0]}[{index - count}]"
    return f"input {name}{jax.tree_util.keystr(tuple(rest))}"
