"""The diagnosis of a failed call: what is reported about it, from the inputs of the call and the recorded program."""

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
from hostcallback.api.watch import report
from hostcallback.api.watch.program_tests import Chosen, Tests, marked
from hostcallback.api.watch.walk import Origin, Value, Walk
from hostcallback.lifecycle import receivers as transport
from hostcallback.lifecycle.reentrant_calls import call_inside_callback
from hostcallback.lowering import xray
from hostcallback.lowering.evaluator import Place
from hostcallback.lowering.inputs import is_inexact
from hostcallback.lowering.silence import NotRepeatableError, Silent
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.nonfinite import Explains
from hostcallback.tracing.source_line import SourceLine

_AGAIN = "the same program on the same inputs, run again operation by operation, made other results"


@dataclass(frozen=True)
class Watched:
    """A program and what of it is watched.

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
    selects: report.Selects = field(default=lambda operation: True)
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
                self.selects(report.operation_of(equation, number, place, line=self.line))
                for number, variable in enumerate(equation.outvars)
                if is_inexact(variable.aval)
            )

        return chosen


Unsound = tuple[tuple[int, ...], str, bytes]
"""The shape and type of a value that is not finite, and which of its elements are not."""


class Diagnosis(NamedTuple):
    """What is known of a failed call.

    Attributes:
        found: what to report, in program order.
        results: the results that are not finite.
    """

    found: list[Explains]
    results: list[Unsound]


def diagnose(
    watched: Watched, arrays: Sequence[Any], device: Any, call: int | None, known: Container[Unsound] = ()
) -> Diagnosis:
    """Says where the values of a failed call ceased to be finite. A receiver thread; compiles and runs programs.

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
def _settings(watched: Watched, device: Any) -> Iterator[None]:
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
    watched: Watched,
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
        report.explains(origin, watched.function, watched.line, call, _name(watched, origin))
        for origin in walk.origins
        if origin in reached and _is_reported(watched, origin, known)
    ]
    return Diagnosis(found, [_unsound(result.array) for result in results if result.sources is not None])


def _walked(
    watched: Watched, values: Sequence[Any], progress: Callable[[], None], *, compiles: bool
) -> tuple[Walk, list[Value], set[Origin]]:
    """Walks the program; returns also the origins that are meant."""
    tests = Tests(watched.chosen, every=watched.every, silent=True)
    flags = tests.failed if watched.every or watched.mark else None
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


def _is_reported(watched: Watched, origin: Origin, known: Container[Unsound]) -> bool:
    if origin.equation is None:
        # An operation outside of jit gets constants as inputs, such as the -inf of a mask, and what others have made.
        if compat.is_eager(watched.closed) and (known or not np.isnan(origin.value).any()):
            return False
        return watched.inputs and _unsound(origin.value) not in known
    if watched.mark and not marked(watched.mark)(origin.equation, origin.place):
        return watched.inputs
    return watched.selects(report.operation_of_origin(origin, watched.line))


def _name(watched: Watched, origin: Origin) -> str:
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


def _results(watched: Watched, call: int | None, note: str) -> list[Explains]:
    avals = watched.closed.out_avals
    names = [
        (f"result{path}", aval)
        for path, aval in zip(compat.result_paths(watched.closed), avals, strict=True)
        if is_inexact(aval)
    ]
    if watched.mark:
        names = [("a value in the watched function", jax.ShapeDtypeStruct((), np.dtype(np.float32)))]
    return report.explains_results(names[:1], note, watched.function, watched.line, call)


def _why_not(watched: Watched, values: Sequence[Any], callbacks: Sequence[str]) -> str:
    if callbacks:
        return f"{_AGAIN}, and it calls {', '.join(dict.fromkeys(callbacks))}"
    whole = jax.jit(lambda *values: Silent().evaluate(watched.closed, values, Place())[0])
    if any(is_inexact(out) and not np.isfinite(np.asarray(out)).all() for out in whole(*values)):
        return f"{_AGAIN}; compiled as a whole it made them again, so the values depend on how XLA fuses operations"
    return f"{_AGAIN}, and so did it compiled as a whole: its operations or its inputs change from run to run"
