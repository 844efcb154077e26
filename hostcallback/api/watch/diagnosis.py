"""The diagnosis of a failed call: from its inputs and the recorded program, the operations that are reported."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.watch.origin import Origin, Value, Walk, shard_map_around
from hostcallback.api.watch.program_tests import Tests, only_results
from hostcallback.lifecycle import receivers as transport
from hostcallback.lifecycle.reentrant_calls import call_inside_callback
from hostcallback.lowering import equations, evaluator, xray
from hostcallback.lowering.inputs import is_inexact
from hostcallback.receiver.failures.check_report import BoundedCounter
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.nonfinite import Explains, Watched
from hostcallback.tracing.source_line import SourceLine, user_source_line


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
Where = str | Selects | None


def selector(where: Where) -> Selects:
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


Unsound = tuple[tuple[int, ...], str, bytes]
"""The shape and type of a value that is not finite, and which of its elements are not."""


def _unsound(value: Any) -> Unsound:
    array = np.asarray(value)
    return array.shape, str(array.dtype), np.packbits(~np.isfinite(array)).tobytes()


class Diagnosis(NamedTuple):
    """The result of the diagnosis of a failed call.

    Attributes:
        found: what to report, in program order.
        results: the results that are not finite.
    """

    found: list[Explains]
    results: list[Unsound]


_compilations_lock = threading.Lock()  # protects the counts
_compilations = BoundedCounter()
"""Watched programs of this process, by the name of their function."""

_AGAIN = "the same program on the same inputs, run again operation by operation, made other results"


@dataclass(frozen=True)
class WatchedProgram:
    """A program and the equations of it that are watched.

    Attributes:
        program: the program, without values.
        name: of its function, for reports.
        line: the user's line that called it first; it is reported where JAX knows none, as for operations outside of
            jit.
        selects: the operations that are reported.
        inputs: whether values that came in are reported.
        every: whether operations with finite operands are reported too whose values do not reach a result.
        compilation: number of the program among those of its name, from 1.
    """

    program: xray.Program
    name: str
    line: SourceLine | None = None
    selects: Selects = field(default=lambda operation: True)
    inputs: bool = True
    every: bool = False
    compilation: int = field(init=False)

    def __post_init__(self) -> None:
        """Numbers the program."""
        with _compilations_lock:
            _compilations[self.name] += 1
            object.__setattr__(self, "compilation", _compilations[self.name])

    def tests(self, operations: evaluator.Evaluator | None = None) -> Tests:
        """Returns the tests of operations, and of what leaves the marked equations, if there is a mark.

        Args:
            operations: evaluates them; None for an evaluator that has their effects.
        """

        def is_selected(equation: compat.JaxprEqn, position: equations.Position) -> bool:
            return self._is_marked(equation, position) and any(
                self.selects(self._operation(equation, number, position))
                for number, variable in enumerate(equation.outvars)
                if is_inexact(variable.aval)
            )

        return Tests(
            left=self._is_marked if self.program.mark else None,
            every=is_selected if self.every else None,
            evaluator=operations,
        )

    def _is_marked(self, equation: compat.JaxprEqn, position: equations.Position) -> bool:
        return position.has_mark(self.program.mark, equation)

    def has_selected(self) -> bool:
        """Whether an operation of the program is selected."""
        return any(
            self.selects(self._operation(equation, number, position))
            for equation, position in equations.equations_in(self.program.closed)
            for number, variable in enumerate(equation.outvars)
            if is_inexact(variable.aval)
        )

    def diagnose(
        self, arrays: Sequence[Any], device: object, call: int | None, known: Container[Unsound] = ()
    ) -> Diagnosis:
        """Finds where the values of a failed call ceased to be finite. Receiver threads; compiles and runs programs.

        Args:
            arrays: the program's constants and inputs, of typed keys their data.
            device: where it ran.
            call: the number of the call; None if it is not known.
            known: inputs that are not reported, because a program that was reported has made them.
        """
        if jax.process_count() > 1:
            return self._unexplained("the program runs in several processes, so it is not looked into", call)
        found: list[Diagnosis] = []

        def inside() -> None:
            with self.program.own_work(device):
                found.append(self._diagnosed(arrays, call, known))

        with runtime.working():
            if getattr(device, "platform", "") == "cpu" and transport.use_native("cpu"):
                call_inside_callback(device, inside)  # the device's threads may all wait for this one
            else:
                inside()
        return found[0]

    def _diagnosed(self, arrays: Sequence[Any], call: int | None, known: Container[Unsound]) -> Diagnosis:
        try:
            avals = self.program.closed.in_avals
            values = [_value(array, aval) for array, aval in zip(arrays, avals, strict=True)]
            walk, results, reached = self._walked(values, compiles=False)
            if not reached and not walk.callbacks and all(result.sources is None for result in results):
                walk, results, reached = self._walked(values, compiles=True)  # for the last bits
            if not reached and all(result.sources is None for result in results):
                return self._unexplained(f"not reproduced: {self._why_not(values, walk.callbacks)}", call)
        except evaluator.NotRepeatableError as error:
            return self._unexplained(f"the call was not run again, because that would repeat {error}", call)
        except Exception as error:
            logger.exception("the walk of a failed call of %s failed", self.name)
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            return self._unexplained(f"the program could not be walked: {text}", call)
        origins = [each for each in walk.origins if each in reached and self._is_reported(each, known)]
        parts = self._parts(walk, origins)
        found = [replace(self._explained(each, call), part=parts.get(each.key, 0)) for each in origins]
        return Diagnosis(found, [_unsound(result.array) for result in results if result.sources is not None])

    def _parts(self, walk: Walk, origins: Sequence[Origin]) -> Mapping[tuple[int, ...], int]:
        # By the keys of origins, the numbers of operations among those of their names and lines in the program.
        # Whether the others failed is no matter, so that an operation has one number in all calls.
        names = {each.equation.primitive.name for each in origins if each.equation is not None}
        alike: Counter[tuple[str, SourceLine | None, bool]] = Counter()
        parts: dict[tuple[int, ...], int] = {}
        for equation, position in equations.equations_in(self.program.closed, instead=walk.per_device):
            if (name := equation.primitive.name) in names:
                line, _, backward = position.place_of(equation)
                for number in range(len(equation.outvars)):
                    key = name, line or self.line, backward
                    parts[*position.key, id(equation), number] = alike[key]
                    alike[key] += 1
        return parts

    def _walked(self, values: Sequence[Any], *, compiles: bool) -> tuple[Walk, list[Value], set[Origin]]:
        # Also returns the origins that are selected.
        mark = self.program.mark
        tests = self.tests(evaluator.Silent())
        walk = Walk(
            tests.failed if self.every or mark else only_results,
            self._is_marked if mark else None,
            compiles=compiles,
        )
        results = walk.run(self.program.closed, values)
        if mark:
            return walk, results, walk.entered
        reached = {origin for result in results for origin in result.sources or ()}
        if self.every:
            reached |= {origin for origin in walk.origins if origin.of_finite}
        return walk, results, reached

    def _is_reported(self, origin: Origin, known: Container[Unsound]) -> bool:
        closed, mark = self.program.closed, self.program.mark
        if origin.equation is None:
            # An operation outside of jit gets constants as inputs, such as the -inf of a mask, and what others have
            # made.
            if compat.is_eager(closed) and (known or not np.isnan(origin.value).any()):
                return False
            return self.inputs and _unsound(origin.value) not in known
        if not origin.position.has_mark(mark, origin.equation):
            return self.inputs
        axes = len(origin.device or ())
        return self.selects(self._operation(origin.equation, origin.number, origin.position, axes))

    def _operation(
        self, equation: compat.JaxprEqn, number: int, position: equations.Position, device_axes: int = 0
    ) -> Operation:
        # A result of an equation; leading axes may stand for devices.
        aval: compat.Aval = equation.outvars[number].aval
        line, scope, backward = position.place_of(equation)
        shape, name = tuple(aval.shape[device_axes:]), equation.primitive.name
        return Operation(name, line or self.line, scope, shape, np.dtype(aval.dtype), backward)

    def _explained(self, origin: Origin, call: int | None) -> Explains:
        value, device = origin.value, ""
        if origin.equation is None:
            name, line, scope, backward = self._input_name(origin), None, "", False
        else:
            name = origin.equation.primitive.name
            line, scope, backward = origin.position.place_of(origin.equation)
            line = line or self.line
        if origin.device is not None and (around := shard_map_around(origin.position)) is not None:
            device = compat.mesh_device(around.params, origin.device)
        watched = self._watched(name, line, value, scope=scope, backward=backward)
        nans, bad = int(np.isnan(value).sum()), int((~np.isfinite(value)).sum())
        where = ""
        if value.ndim:
            index = ",".join(map(str, origin.element))
            where = f"{bad} of {value.size} elements are not finite, the first at [{index}]"
        if origin.equation is not None and (caller := origin.position.caller_of(origin.equation)):
            where = f"{where}; {name} is part of {caller}".removeprefix("; ")
        return Explains(
            watched, nans, bad - nans, origin.position.iterations, where, origin.element, origin.operands, call, device
        )  # fmt: skip

    def _watched(
        self, name: str, line: Any, value: Any, *, scope: str = "", backward: bool = False, note: str = ""
    ) -> Watched:
        return Watched(
            name, line, scope, tuple(value.shape), str(value.dtype), backward, note=note, step=self.name,
            compilation=self.compilation,
        )  # fmt: skip

    def _input_name(self, origin: Origin) -> str:
        number = origin.number - len(self.program.constants)
        if number < 0:
            path = f"constant {origin.number}"
        else:
            first, *rest = self.program.paths[origin.number] or (str(number),)
            path = f"input {first}" + "".join(f"[{p}]" if p.isdecimal() else f"[{p!r}]" for p in rest)
        return path + (f"[{','.join(map(str, origin.element))}]" if origin.element else "")

    def _unexplained(self, note: str, call: int | None) -> Diagnosis:
        # The report of a result of which no origin is known, and why not.
        closed = self.program.closed
        results = zip(compat.result_paths(closed), closed.out_avals, strict=True)
        names = [(f"result{path}", aval) for path, aval in results if is_inexact(aval)]
        if self.program.mark:
            names = [("a value in the watched function", jax.ShapeDtypeStruct((), np.dtype(np.float32)))]
        found = [self._watched(name, self.line, aval, note=note) for name, aval in names[:1]]
        return Diagnosis([Explains(watched, 0, 0, (), call=call) for watched in found], [])

    def _why_not(self, values: Sequence[Any], callbacks: Sequence[str]) -> str:
        if callbacks:
            return f"{_AGAIN}, and it calls {', '.join(dict.fromkeys(callbacks))}"
        whole = jax.jit(lambda *values: evaluator.Silent().evaluate(self.program.closed, values)[0])
        if any(is_inexact(out) and not np.isfinite(np.asarray(out)).all() for out in whole(*values)):
            return f"{_AGAIN}; compiled as a whole it made them again, so the values depend on how XLA fuses operations"
        return f"{_AGAIN}, and so did it compiled as a whole: its operations or its inputs change from run to run"


def _value(array: Any, aval: compat.Aval) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return compat.wrap_keys(array, aval)
    return np.asarray(array, aval.dtype)  # of a type with few bits the message has whole bytes
