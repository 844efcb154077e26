"""Operations of a watched program: their selection by `where=`, and the reports of those that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.watch.walk import Origin
from hostcallback.lowering.evaluator import Place
from hostcallback.receiver.sinks.nonfinite import Explains, Watched
from hostcallback.tracing import scopes
from hostcallback.tracing.source_line import SourceLine, first_user_line, user_source_line


@dataclass(frozen=True)
class Operation:
    """One result of one equation of a watched program.

    Attributes:
        primitive: the name of JAX's primitive, such as `log`.
        source_line: the user's line; None if JAX does not know it.
        scope: the named scopes around it, separated by `/`.
        shape: shape of the result; under vmap, with the batch.
        dtype: dtype of the result.
        backward: whether it is part of a backward pass.

    Example:
        step = hcb.watch_nonfinite(jax.jit(train_step), where=lambda operation: operation.primitive == "log")
    """

    primitive: str
    source_line: SourceLine | None
    scope: str
    shape: tuple[int, ...]
    dtype: Any
    backward: bool


Selects = Callable[[Operation], bool]


def selector(where: Any) -> Selects:
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


def operation_of(
    equation: Any, number: int, place: Place, mesh: int = 0, line: SourceLine | None = None
) -> Operation:
    """Describes a result of an equation.

    Args:
        equation: the equation.
        number: of the result.
        place: of its program.
        mesh: number of leading axes that stand for devices.
        line: the user's line if JAX knows none, as of operations outside of jit.
    """
    aval = equation.outvars[number].aval
    stacks = [str(e.source_info.name_stack) for e in (*place.equations, equation)]
    # The operations within a function of JAX are reported at the user's line that calls the function.
    lines = (first_user_line(compat.equation_frames(e)) for e in (equation, *reversed(place.equations)))
    return Operation(
        equation.primitive.name,
        next((found for found in lines if found is not None), line),
        "/".join(part for stack in stacks for part in scopes.scope_of(stack)),
        tuple(aval.shape[mesh:]),
        np.dtype(aval.dtype),
        any(map(scopes.is_backward, stacks)) and not any(map(scopes.is_recomputed, stacks)),
    )


def operation_of_origin(origin: Origin, line: SourceLine | None) -> Operation:
    """Describes the operation of an origin, which is no input; `line` as in `operation_of`."""
    return operation_of(origin.equation, origin.number, origin.place, len(origin.device or ()), line)


def explains(
    origin: Origin, step: str, line: SourceLine | None, call: int | None, name: str = ""
) -> Explains:
    """The report of an origin.

    Args:
        origin: the origin.
        step: the name of the program.
        line: the user's line that is reported where JAX knows none, as for operations outside of jit.
        call: the number of the call; None if it is not known.
        name: of an input.
    """
    value = origin.value
    if origin.equation is None:
        watched = Watched(name, None, "", value.shape, str(value.dtype), False, False, step=step)
    else:
        operation = operation_of_origin(origin, line)
        watched = Watched(
            operation.primitive, operation.source_line, operation.scope, value.shape, str(value.dtype),
            operation.backward, False, step=step,
        )  # fmt: skip
    nans = int(np.isnan(value).sum())
    bad = int((~np.isfinite(value)).sum())
    where = ""
    if value.ndim:
        index = ",".join(map(str, origin.element))
        where = f"{bad} of {value.size} elements are not finite, the first at [{index}]"
    return Explains(
        watched, nans, bad - nans, origin.iteration, where, origin.element, origin.operands, call,
        _device_of(origin),
    )  # fmt: skip


def _device_of(origin: Origin) -> str:
    for equation in reversed(origin.place.equations):
        if origin.device is not None and equation.primitive.name == "shard_map":
            return compat.mesh_device(equation.params, origin.device)
    return ""


def explains_results(
    names: Sequence[tuple[str, Any]], note: str, step: str, line: SourceLine | None, call: int | None
) -> list[Explains]:
    """The reports of results of which no origin is known.

    Args:
        names: names and types of the results.
        note: why not.
        step: the name of the program.
        line: the user's line that is reported.
        call: the number of the call; None if it is not known.
    """
    return [
        Explains(
            Watched(name, line, "", tuple(aval.shape), str(aval.dtype), False, False, note=note, step=step),
            0, 0, (), call=call,
        )
        for name, aval in names
    ]  # fmt: skip
