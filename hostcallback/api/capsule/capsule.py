"""`capsule`: programs send their inputs if a call of them fails; with the failure's report, these become one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback.api.capsule.held_program import CapsuleOptions, HeldProgram, outside_of_jit
from hostcallback.api.watch import watch
from hostcallback.lowering import device_ops, equations, evaluator, inputs, xray
from hostcallback.primitives.call import call_p
from hostcallback.primitives.tap import tap_p
from hostcallback.receiver.files import refuse_unwritable
from hostcallback.receiver.log import logger
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.arguments import refuse_compiled
from hostcallback.tracing.source_line import public, user_source_line

P = ParamSpec("P")
R = TypeVar("R")

MAX_BYTES = 1 << 30

LOGGED = 16
"""Elements of each input of a failed call that a log has; the capsule has all."""


class Options(TypedDict, total=False):
    """The options of `capsule`, for type checkers."""

    nonfinite: bool
    exceptions: bool
    max_bytes: int
    max_capsules: int
    all_threads: bool


@overload
def capsule(step: str | os.PathLike[str] = ..., /, **options: Unpack[Options]) -> xray.Context: ...
@overload
def capsule(
    step: Callable[P, R], directory: str | os.PathLike[str] = ..., **options: Unpack[Options]
) -> Callable[P, R]: ...
@public
def capsule(
    step: Any = "capsules",
    directory: str | os.PathLike[str] = "capsules",
    *,
    nonfinite: bool = False,
    exceptions: bool = False,
    max_bytes: int = MAX_BYTES,
    max_capsules: int = 3,
    all_threads: bool = False,
) -> Any:
    """Writes a file that reproduces the failure for each call of a jitted function that fails.

    `with hcb.capsule(folder): ...` holds for every jitted function that is called in the block;
    `hcb.capsule(step, folder)` returns `step`, called in such a block. A call fails if a check in it fails
    (`hcb.check`, `hcb.checked`), if a tap function raises, or, with `nonfinite=True`, if its results have a NaN or an
    infinite value. The file, a *capsule*, has the program with its taps and checks, the inputs of that call, the
    report, versions and devices, and, if the receiver records, the last messages. `hcb reproduce FILE` runs it on any
    machine with JAX; docs/capsules.md describes it.

    No Python runs in a call: the program itself sends its inputs at its end if the call has failed. Donated inputs are
    copied at its beginning. A receiver thread writes the capsule, which is on the disk when its path is logged, and at
    the latest when `hcb.barrier_wait` returns or the receiver ends.

    An exception of a tap function is known only when the inputs are gone. Such a capsule has the value that the tap
    got, and no inputs, unless the option `exceptions` is set.

    Args:
        step: a function that calls jitted ones, or the folder of the capsules for a `with` block.
        directory: folder of the capsules, made when it is needed.
        nonfinite: whether results that are not finite are failures, which are reported as a `NonFiniteError`.
        exceptions: whether programs with taps send their inputs in each call, for tap functions that raise: this costs
            a copy of the inputs.
        max_bytes: largest number of bytes of inputs in a capsule; larger inputs are left out, the largest first.
        max_capsules: number of capsules of each jitted function; those with the same options and folder count together.
        all_threads: whether the programs of other threads are meant too, except those that tap functions run.

    Returns:
        The function, with the signature of `step`; without one, a context manager, which is also a decorator:
        `@hcb.capsule("capsules", nonfinite=True)`. Any thread.

    Raises:
        TypeError: `step` is neither a function nor a path, or was compiled ahead of time; `directory` is no path.
        ValueError: a number is out of range.
        NotADirectoryError: the folder is a file.
        OSError: the folder, or the one that it would be made in, may not be written to.

    Example:
        with hcb.capsule("capsules", nonfinite=True):
            train()
    """
    for name, value in {"max_bytes": max_bytes, "max_capsules": max_capsules}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1")
    is_folder = isinstance(step, str | os.PathLike)
    if not is_folder and not callable(step):
        raise TypeError(
            f"hcb.capsule takes a function or a folder, got {type(step).__name__} {step!r}: step = hcb.capsule(step), "
            "or with hcb.capsule('capsules')"
        )
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"hcb.capsule's second argument is the folder, got {type(directory).__name__} {directory!r:.80}: the "
            "function comes first, step = hcb.capsule(step, 'capsules')"
        )
    refuse_compiled("capsule", step)
    folder = Path(step if is_folder else directory).absolute()
    line = user_source_line()
    if folder.is_file():
        raise NotADirectoryError(f"hcb.capsule: {folder} is a file, expected a folder, at {line}")
    refuse_unwritable(folder, "hcb.capsule", f", at {line}")
    options = Capsules(folder, str(line), nonfinite, exceptions, max_bytes, max_capsules)
    context = xray.Context(options, all_threads=all_threads)
    return context if is_folder else context.wrap(step)


# ---- Programs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capsules(CapsuleOptions):
    """Rewrites programs to send their inputs."""

    made_by = "hcb.capsule"
    order = 10  # the last: it looks for checks in the program as it runs

    def rewrite(self, program: xray.Program, context: xray.Context) -> compat.ClosedJaxpr | None:
        """Returns the program extended so that a failing call sends its inputs. Its taps get separate consumers."""
        if compat.is_eager(program.closed) or _is_held(program.tapped, self):
            return None
        context.notes["programs"] = True
        self.seen.add(program.function)
        taps = list(_taps_in(program.tapped))
        always = self.exceptions and bool(taps)
        tests = self.nonfinite and any(map(inputs.is_inexact, program.closed.out_avals))
        if not taps and not tests:
            return None
        held = HeldProgram(self, program, reports=not any(map(_is_watch, taps)))
        sends = always or tests or any(map(_is_check, taps))
        own_taps = _OwnTaps(held)

        def run(*values: jax.Array) -> list[jax.Array]:
            def evaluate(values: Sequence[jax.Array]) -> tuple[list[Any], Any]:
                return own_taps.failed(program.tapped, values)

            if not sends:
                return evaluate(values)[0]
            (outs, failed), kept = inputs.run_keeping_inputs(
                replace(program, donated=held.donated), values, evaluate
            )
            bad = inputs.any_not_finite(outs, program.devices) if tests else jnp.zeros((), bool)
            # Which call it is: as `watch_nonfinite` counts.
            judged = [device_ops.verdict(bad[None], f"capsule of {program.function}")] if tests else []
            any_failed = failed | bad | always
            inputs.send_inputs_if(
                any_failed, [*(kept[i] for i in held.sent), bad, *judged], held, f"capsule:{held.name}",
                params={tap_descriptor.LOGGED_ELEMENTS: LOGGED},
            )  # fmt: skip
            return list(outs)

        return program.run(run)

    def passed_over(self, closed: compat.ClosedJaxpr) -> None:
        """Notes the taps that run outside of jit, to say of those that fail that they leave no capsules."""
        found = (e.params["tap"] for e in _taps_in(closed) if e.primitive is tap_p)
        outside_of_jit.update(str(tap.source_line) for tap in found if not watch.reports_all(tap))

    def left(self, context: xray.Context, function: str | None) -> None:
        """Warns once if no jitted function was called in the block."""
        # A block that is entered again lowers nothing.
        known = context.notes.get("programs") or (function is None and self.seen)
        if not known and not context.notes.setdefault("told", False):
            context.notes["told"] = True
            logger.warning(
                "hcb.capsule saw no program of a jitted function in %s: operations outside of jit leave no capsules, "
                "so jit it; functions that were compiled ahead of time (lower().compile()) keep their programs, so "
                "compile them in a block of hcb.capsule", function or "the block",
            )  # fmt: skip


def _taps_in(*jaxprs: compat.AnyJaxpr) -> Iterator[compat.JaxprEqn]:
    return compat.equations_of([compat.open_jaxpr(jaxpr)[0] for jaxpr in jaxprs], (tap_p, call_p))


def _is_check(equation: compat.JaxprEqn) -> bool:
    return equation.primitive is tap_p and bool(equation.params["tap"].options.kind.is_check)


def _is_watch(equation: compat.JaxprEqn) -> bool:
    return equation.primitive is tap_p and watch.reports_all(equation.params["tap"])


def _is_held(tapped: compat.AnyJaxpr, capsules: Capsules) -> bool:
    # A function that was wrapped and called in a trace, in a program that was called in the context too.
    found = [e.params["tap"].origin for e in _taps_in(tapped) if e.primitive is tap_p]
    return any(isinstance(origin, HeldProgram) and origin.options is capsules for origin in found)


class _OwnTaps(evaluator.Tester):
    """Gives the taps of a program consumers of their own, and tests whether a check failed."""

    def __init__(self, held: HeldProgram) -> None:
        self._held = held

    def enters(self, equation: compat.JaxprEqn, position: equations.Position) -> bool:
        return any(_taps_in(*(program for program, _ in equations.structure_of(equation).programs)))

    def bind(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        key = {tap_p: "tap", call_p: "call"}.get(equation.primitive)
        if key is None:
            return compat.bind_equation(equation, values)
        params = {**equation.params, key: self._held.own(equation.params[key])}
        return list(equation.primitive.bind(*values, **params))

    def made(
        self,
        equation: compat.JaxprEqn,
        values: list[jax.Array],
        outs: Sequence[jax.Array],
        position: equations.Position,
        records: evaluator.Records,
    ) -> None:
        if _is_check(equation):
            self.fail_if(records, ~jnp.asarray(values[0]))
