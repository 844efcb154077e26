"""An operation of a watched function, and the selection of operations by `where=`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hostcallback.tracing.source_line import SourceLine, user_source_line


@dataclass(frozen=True)
class Operation:
    """One result of one equation of a watched function.

    Attributes:
        primitive: the name of JAX's primitive, such as `log`.
        source_line: the user's line; None if JAX does not know it.
        scope: the named scopes around it, separated by `/`.
        shape: shape of the result; under vmap, of one element.
        dtype: dtype of the result.
        backward: whether it is part of a backward pass within the watched function, as in `watch_nonfinite(grad(f))`.
        rerun_of: the name of the watched step if this is a second run of it, after a failed test of its results.

    Example:
        step = jax.jit(hcb.watch_nonfinite(train_step, where=lambda operation: operation.primitive == "log"))
    """

    primitive: str
    source_line: SourceLine | None
    scope: str
    shape: tuple[int, ...]
    dtype: Any
    backward: bool
    rerun_of: str | None = None


def selector(where: Any) -> Callable[[Operation], bool]:
    """Returns the function that `watch_nonfinite(where=)` stands for; raises TypeError for another type."""
    if where is None:
        return lambda operation: True
    if callable(where):
        return lambda operation: bool(where(operation))
    if not isinstance(where, str):
        raise TypeError(
            f"watch_nonfinite's where={where!r} is of type {type(where).__name__}, expected None, the name of a scope, "
            f"the end of a file's path such as 'model.py', or a function of an Operation, at {user_source_line()}"
        )
    part = f"/{where.strip('/')}/"
    if where.endswith(".py"):
        return lambda operation: (
            part in f"/{operation.source_line.file if operation.source_line else ''}/"[-len(part) :]
        )
    return lambda operation: part in f"/{operation.scope}/"


_TRANSFORM = re.compile(r"\b[a-z_]+\((?=[^()]*\)|[a-z_]+\()|\)")


def scope_of(names: Sequence[str]) -> str:
    """Returns the scope that name stacks stand for, without the names of transformations."""
    # JAX wraps the names of transformed scopes: `transpose(jvp(loss))/attention`.
    parts = (_TRANSFORM.sub("", part) for name in names for part in name.split("/"))
    return "/".join(part for part in parts if part)
