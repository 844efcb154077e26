"""The diagnosis of a failed call: from its inputs and the recorded program, the operations that are reported."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.watch.program_tests import Chosen, Tests, marked, only_results
from hostcallback.api.watch.walk import Origin, Value, Walk
from hostcallback.lifecycle import receivers as transport
from hostcallback.lifecycle.reentrant_calls import call_inside_callback
from hostcallback.lowering import xray
from hostcallback.lowering.evaluator import NotRepeatableError, Place, Silent
from hostcallback.lowering.inputs import is_inexact
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.nonfinite import Explains, Watched
from hostcallback.tracing import source_line
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
        "/".join(part for stack in stacks for part in source_line.scope_of(stack)),
        tuple(aval.shape[mesh:]),
        np.dtype(aval.dtype),
        any(map(source_line.is_backward, stacks)) and not any(map(source_line.is_recomputed, stacks)),
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


_AGAIN = "the same program on the same inputs, run again operation by operation, made other results"


@dataclass(frozen=True)
class WatchedProgram:
    """A program and the equations of it that are watched.

    Attributes:
        closed: the program, a closed jaxpr without constants.
        function: its name, for reports.
        paths: for each input that is no constant, its path in the user's arguments.
        constants: number of the inputs that are constants.
        line: the user's line that called it first.
        selects: the operations that are reported.
        inputs: whether values that came in are reported.
        every: whether operations are reported whose values do not reach a result.
        mark: the scope of the equations that are watched; "" for all.
        x64: whether JAX's 64-bit types were on.
    """

    closed: Any
    function: str
    paths: Sequence[tuple[str, ...]]
    constants: int
    line: SourceLine | None
    selects: Selects = field(default=lambda operation: True)
    inputs: bool = True
    every: bool = False
    mark: str = ""
    x64: bool = field(default_factory=lambda: bool(jax.config.read("jax_enable_x64")))

    @property
    def chosen(self) -> Chosen:
        """The equations that are watched."""
        marks = marked(self.mark)
        if not self.every:
            return marks

        def chosen(equation: Any, place: Place) -> bool:
            return marks(equation, place) and any(
                self.selects(operation_of(equation, number, place, line=self.line))
                for number, variable in enumerate(equation.outvars)
                if is_inexact(variable.aval)
            )

        return chosen


Unsound = tuple[tuple[int, ...], str, bytes]
"""The shape and type of a value that is not finite, and which of its elements are not."""


class Diagnosis(NamedTuple):
    """The result of the diagnosis of a failed call.

    Attributes:
        found: what to report, in program order.
        results: the results that are not finite.
    """

    found: list[Explains]
    results: list[Unsound]


def diagnose(
    watched: WatchedProgram,
    arrays: Sequence[Any],
    device: Any,
    call: int | None,
    known: Container[Unsound] = (),
) -> Diagnosis:
    """Finds where the values of a failed call ceased to be finite. On a receiver thread; compiles and runs programs.

    Args:
        watched: the program.
        arrays: its constants and inputs, of typed keys their data.
        device: where it ran.
        call: the number of the call; None if it is not known.
        known: inputs that are not reported, because a program that was reported has made them.
    """
    if jax.process_count() > 1:
        note = "the program runs in several processes, so it is not looked into"
        return Diagnosis(_results(watched, call, note), [])
    found: list[Diagnosis] = []
    progress = functools.partial(runtime.note_progress, threading.current_thread())

    def inside() -> None:
        with _settings(watched, device):
            found.append(_diagnose(watched, arrays, call, known, progress))

    if getattr(device, "platform", "") == "cpu" and transport.use_native("cpu"):
        call_inside_callback(device, inside)  # the device's threads may all wait for this one
    else:
        inside()
    return found[0]


@contextlib.contextmanager
def _settings(watched: WatchedProgram, device: Any) -> Iterator[None]:
    # What the user has set for programs of their own.
    with contextlib.ExitStack() as stack:
        stack.enter_context(xray.closed())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.check_tracer_leaks(False))
        stack.enter_context(jax.enable_x64(watched.x64))
        if isinstance(device, jax.Device):
            stack.enter_context(jax.default_device(device))
        yield


def _diagnose(
    watched: WatchedProgram,
    arrays: Sequence[Any],
    call: int | None,
    known: Container[Unsound],
    progress: Callable[[], None],
) -> Diagnosis:
    try:
        values = [_value(array, aval) for array, aval in zip(arrays, watched.closed.in_avals, strict=True)]
        walk, results, reached = _walked(watched, values, progress, compiles=False)
        if not reached and not walk.callbacks and all(result.sources is None for result in results):
            walk, results, reached = _walked(watched, values, progress, compiles=True)  # for the last bits
        if not reached and all(result.sources is None for result in results):
            note = f"not reproduced: {_why_not(watched, values, walk.callbacks)}"
            return Diagnosis(_results(watched, call, note), [])
    except NotRepeatableError as error:
        note = f"the call was not run again, because that would repeat {error}"
        return Diagnosis(_results(watched, call, note), [])
    except Exception as error:
        logger.exception("the walk of a failed call of %s failed", watched.function)
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Diagnosis(_results(watched, call, f"the program could not be walked: {text}"), [])
    found = [
        explains(origin, watched.function, watched.line, call, _name(watched, origin))
        for origin in walk.origins
        if origin in reached and _is_reported(watched, origin, known)
    ]
    return Diagnosis(found, [_unsound(result.array) for result in results if result.sources is not None])


def _walked(
    watched: WatchedProgram, values: Sequence[Any], progress: Callable[[], None], *, compiles: bool
) -> tuple[Walk, list[Value], set[Origin]]:
    """Walks the program; also returns the origins that are selected."""
    tests = Tests(watched.chosen, every=watched.every, silent=True)
    flags = tests.failed if watched.every or watched.mark else only_results
    walk = Walk(flags, watched.chosen if watched.mark else None, compiles=compiles, progress=progress)
    results = walk.run(watched.closed, values)
    if watched.mark:
        return walk, results, walk.entered
    if watched.every:
        return walk, results, set(walk.origins)
    return walk, results, {origin for result in results for origin in result.sources or ()}


def _unsound(value: Any) -> Unsound:
    array = np.asarray(value)
    return array.shape, str(array.dtype), np.packbits(~np.isfinite(array)).tobytes()


def _is_reported(watched: WatchedProgram, origin: Origin, known: Container[Unsound]) -> bool:
    if origin.equation is None:
        # An operation outside of jit gets constants as inputs, such as the -inf of a mask, and what others have made.
        if compat.is_eager(watched.closed) and (known or not np.isnan(origin.value).any()):
            return False
        return watched.inputs and _unsound(origin.value) not in known
    if watched.mark and not marked(watched.mark)(origin.equation, origin.place):
        return watched.inputs
    return watched.selects(operation_of_origin(origin, watched.line))


def _name(watched: WatchedProgram, origin: Origin) -> str:
    if origin.equation is not None:
        return ""
    number = origin.number - watched.constants
    if number < 0:
        path = f"constant {origin.number}"
    else:
        first, *rest = watched.paths[number] or (str(number),)
        path = f"input {first}" + "".join(f"[{p}]" if p.isdecimal() else f"[{p!r}]" for p in rest)
    return path + (f"[{','.join(map(str, origin.element))}]" if origin.element else "")


def _value(array: Any, aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return compat.wrap_keys(array, aval)
    return np.asarray(array, aval.dtype)  # of a type with few bits the message has whole bytes


def _results(watched: WatchedProgram, call: int | None, note: str) -> list[Explains]:
    avals = watched.closed.out_avals
    names = [
        (f"result{path}", aval)
        for path, aval in zip(compat.result_paths(watched.closed), avals, strict=True)
        if is_inexact(aval)
    ]
    if watched.mark:
        names = [("a value in the watched function", jax.ShapeDtypeStruct((), np.dtype(np.float32)))]
    return explains_results(names[:1], note, watched.function, watched.line, call)


def _why_not(watched: WatchedProgram, values: Sequence[Any], callbacks: Sequence[str]) -> str:
    if callbacks:
        return f"{_AGAIN}, and it calls {', '.join(dict.fromkeys(callbacks))}"
    whole = jax.jit(lambda *values: Silent().evaluate(watched.closed, values, Place())[0])
    if any(is_inexact(out) and not np.isfinite(np.asarray(out)).all() for out in whole(*values)):
        return f"{_AGAIN}; compiled as a whole it made them again, so the values depend on how XLA fuses operations"
    return f"{_AGAIN}, and so did it compiled as a whole: its operations or its inputs change from run to run"
