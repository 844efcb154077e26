"""Runs the program of a capsule on its inputs, and compares what fails with the capsule; or writes a script for it."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from hostcallback.api.barrier import barrier_wait
from hostcallback.api.capsule.digests import TAP
from hostcallback.api.capsule.program import placed
from hostcallback.api.export import bind, unbind
from hostcallback.api.failures.failures import described
from hostcallback.api.receiver import outfeed_receiver
from hostcallback.receiver.capsule.file_format import PROGRAM, PROMOTED, WATCHED, CapsuleError, Failure, Input
from hostcallback.receiver.capsule.reading import Capsule
from hostcallback.receiver.errors import TapFailure, TapFunctionException
from hostcallback.receiver.messages import deferred_errors
from hostcallback.receiver.messages.check_report import FailedCheck
from hostcallback.receiver.messages.message import Message

KEPT = 100
"""Number of messages that are kept for each tap."""


@dataclass(frozen=True)
class Reproduction:
    """What a run of a capsule's program showed.

    Attributes:
        found: the failures, in the order of their messages.
        reports: a report of each.
        same: the failure that the capsule has; None if it did not happen.
        is_exact: whether that one has the same text, and so the same values.
        got: for a tap whose function raised, and which is not bound: the last value that it got; None otherwise.
        results: the arrays that the program returned.
    """

    found: list[Failure]
    reports: list[str]
    same: Failure | None
    is_exact: bool
    got: Any
    results: list[Any]


def load(capsule: Capsule, program: str = PROGRAM) -> jax.export.Exported:
    """Returns the program of a capsule.

    Raises:
        CapsuleError: it was left out, or this JAX cannot read it.
    """
    if not capsule.has(program):
        why = next((text for text in capsule.left_out if text.startswith("the program")), "it was left out")
        raise CapsuleError(
            f"{capsule.path} has no {program}: {why}. Its inputs can be read: receiver.Capsule"
        )
    data = bytearray(capsule.member(program))
    try:
        exported = jax.export.deserialize(data)
    except Exception as error:
        made = capsule.about.get("versions")
        wrote = str(made.get("jax", "?"))[:80] if isinstance(made, dict) else "?"
        raise CapsuleError(
            f"{capsule.path}: JAX {jax.__version__} cannot read the program, which JAX {wrote} wrote: "
            f"{_first_line(error)}. JAX reads programs of versions up to six months older"
        ) from None
    if len(exported.in_avals) != len(capsule.inputs):
        raise CapsuleError(
            f"{capsule.path}: the program takes {len(exported.in_avals)} arrays, and the capsule has "
            f"{len(capsule.inputs)}"
        )
    return exported


def arrays_of(capsule: Capsule, devices: int = 1) -> list[Any]:
    """Returns the inputs on this process's devices, partitioned as they were.

    Args:
        capsule: the capsule.
        devices: number of devices on which the program runs, `load(capsule).nr_devices`.

    Raises:
        CapsuleError: some were left out, or need more devices.
    """
    missing = [entry for entry in capsule.inputs if entry.left_out]
    if missing:
        raise CapsuleError(
            f"{capsule.path}: {len(missing)} input(s) are not in the capsule, such as {missing[0].path}: "
            f"{missing[0].left_out}"
        )
    most = max((devices, *(_devices_of(entry.mesh) for entry in capsule.inputs)))
    if most > len(jax.devices()):
        raise CapsuleError(
            f"{capsule.path}: the program ran on {most} devices, and there are {len(jax.devices())}: on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={most}"
        )
    # What was on one device goes to all of those of the program.
    mesh = next(
        (entry.mesh for entry in capsule.inputs if entry.mesh), (("devices", devices),) if devices > 1 else ()
    )
    return [_placed(capsule, entry, mesh) for entry in capsule.inputs]


def _placed(capsule: Capsule, entry: Input, mesh: tuple[tuple[str, int], ...]) -> Any:
    has, whole = sum(math.prod(shard.shape) for shard in entry.shards), math.prod(entry.shape)
    if not entry.shards or has != whole:
        raise CapsuleError(f"{capsule.path}: {entry.path} has {has:,} of its {whole:,} elements")
    try:
        return placed(entry, functools.partial(capsule.array, entry), mesh)
    except (CapsuleError, OSError, MemoryError):
        raise
    except Exception as error:  # a mesh or dtype that JAX does not have
        raise CapsuleError(f"{capsule.path}: {entry.path} cannot be made: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:500]}"


def _devices_of(mesh: tuple[tuple[str, int], ...]) -> int:
    count = 1
    for _, size in mesh:
        count *= size
    return count


# ---- The results of its operations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digest:
    """The result of one operation in one run.

    Attributes:
        name: primitive, shape, line and scope.
        iterations: numbers of the iterations of the loops around it, outermost first.
        occurrence: how many operations of that name were before it, in the same iterations.
        hash: of its bits.
        stats: smallest, largest, mean, root mean square, and the first elements.
    """

    name: str
    iterations: tuple[int, ...]
    occurrence: int
    hash: int
    stats: tuple[float, ...]


def digests(capsule: Capsule, program: str = WATCHED, device: Any = None) -> list[Digest]:
    """Runs a program of digests; returns what it sends, in program order.

    Args:
        capsule: the capsule.
        program: the member.
        device: where to run it; None for where the inputs are.

    Raises:
        CapsuleError: the program was left out, or cannot be run here.
    """
    exported = load(capsule, program)
    arrays = arrays_of(capsule, exported.nr_devices)
    found: list[Digest] = []
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def receive(value: Any, operations: str) -> None:
        iterations = tuple(int(number) for number in value["iterations"])
        for name, bits, stats in zip(operations.split("\n"), value["hash"], value["stats"], strict=True):
            key = (name, iterations)
            found.append(Digest(*key, seen[key], int(bits), tuple(map(float, stats))))
            seen[key] += 1

    bind(TAP, receive)
    try:
        with jax.enable_x64(program == PROMOTED or bool(capsule.about.get("x64"))):
            given = [jnp.asarray(a, aval.dtype) for a, aval in zip(arrays, exported.in_avals, strict=True)]
            if device is not None:
                given = jax.device_put(given, device)
            jax.block_until_ready(jax.jit(exported.call)(*given))
        barrier_wait()
    finally:
        unbind(TAP)
    return found


def place_of_failure(operations: Sequence[Digest], failure: Failure) -> int | None:
    """The operation at which a step failed: its number in program order, or None if it is not known.

    Args:
        operations: the digests of the step's run.
        failure: of the capsule.
    """
    line = failure.source_line.partition(" (")[0]
    here = [number for number, digest in enumerate(operations) if f" at {line} (" in digest.name]
    if failure.kind == "nonfinite":
        bad = [n for n, digest in enumerate(operations) if not np.isfinite(digest.stats).all()]
        best = [n for n in bad if n in here and operations[n].name.startswith(f"{_primitive(failure)} ")]
        return next(iter([*best, *(n for n in bad if n in here), *bad]), None)
    taps = [n for n in here if operations[n].name.startswith("tap ")]
    if failure.kind == "check":  # the predicate of the one that failed is false
        taps = [n for n in taps if operations[n].stats[0] == 0.0]
    return taps[0] if taps else None


# ---- Running it ------------------------------------------------------------------------------------------------------


def reproduce(capsule: Capsule, bindings: Mapping[str, Callable[..., Any]] | None = None) -> Reproduction:
    """Runs the program of a capsule. Prints, logs and checks in it do what they do.

    Args:
        capsule: the capsule.
        bindings: functions for its taps by name, see `hcb.bind`; other taps do nothing.

    Raises:
        CapsuleError: it cannot be run here.
    """
    exported = load(capsule)
    arrays = arrays_of(capsule, exported.nr_devices)
    for name, func in (bindings or {}).items():
        bind(name, func)
    last: dict[str, Any] = {}

    def keep(message: Message) -> None:
        last[message.consumer.name] = message.consumer.unflatten(message.arrays)

    found: list[FailedCheck | TapFailure] = []
    notice = found.append  # one object: each access makes another
    deferred_errors.listen(notice)
    results: list[Any] = []
    try:
        with outfeed_receiver(sinks=[keep]):
            results = jax.jit(exported.call)(*arrays)
            jax.block_until_ready(results)
            barrier_wait()
    except TapFunctionException:
        pass  # `found` has them, and what nothing is bound to is no failure
    except Exception as error:
        if not found:  # `on_error="abort"` and breakpoints end a program too
            raise CapsuleError(
                f"{capsule.path}: the program does not run here: {_first_line(error)}"
            ) from None
    finally:
        deferred_errors.ignore(notice)
    result = _compared(capsule.failure, found, last, results)
    if result.same is None and capsule.failure.kind == "nonfinite":
        return _not_finite(capsule, result, arrays)
    return result


def _compared(
    expected: Failure, found: list[FailedCheck | TapFailure], last: dict[str, Any], results: list[Any]
) -> Reproduction:
    failures = [described(failure) for failure in found]
    reports = [
        f.report() if isinstance(f, FailedCheck) else "".join(traceback.format_exception(f.exception))
        for f in found
    ]
    alike = [f for f in failures if (f.kind, f.source_line) == (expected.kind, expected.source_line)]
    exact = [f for f in alike if f.text == expected.text]
    same = next(iter([*exact, *alike]), None)
    got = last.get(expected.name) if expected.kind == "tap exception" and same is None else None
    return Reproduction(failures, reports, same, bool(exact), got, results)


def _not_finite(capsule: Capsule, result: Reproduction, arrays: list[Any]) -> Reproduction:
    # The program itself does not test its values, except in capsules of earlier versions.
    expected = capsule.failure
    bad = [entry.path for entry, array in zip(capsule.inputs, arrays, strict=True) if _is_bad(array)]
    reports = [f"the input {bad[0]} has values that are not finite"] if bad else []
    is_same = bool(bad) if expected.name.startswith("input") else any(map(_is_bad, result.results))
    operations = digests(capsule)
    place = place_of_failure(operations, expected)
    if place is not None:
        digest, line = operations[place], expected.source_line.partition(" (")[0]
        low, high, *_ = digest.stats
        at = f", iteration {', '.join(map(str, digest.iterations))}" if digest.iterations else ""
        reports.append(f"not finite: {digest.name}{at}: min {low:g}, max {high:g}")
        if not expected.name.startswith(("input", "result")):
            is_same = f" at {line} (" in digest.name and digest.name.startswith(f"{_primitive(expected)} ")
    found = [*result.found, expected] if is_same else result.found
    reports = [*result.reports, *reports]
    return replace(result, found=found, reports=reports, same=expected if is_same else None, is_exact=is_same)


def _primitive(failure: Failure) -> str:
    # Of the name of an operation in reports.
    return failure.name.rpartition(", ")[2].removeprefix("cotangent of ")


def _is_bad(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact)) and not bool(jnp.isfinite(array).all())


def function_of(text: str) -> Callable[..., Any]:
    """Imports the function that `MODULE:NAME` stands for.

    Raises:
        ValueError: there is none.
    """
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r} names no function: {error}; expected MODULE:FUNCTION") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ValueError(f"{text!r} is a {type(found).__name__}, expected a function")
    return found  # type: ignore[no-any-return]


# ---- A script --------------------------------------------------------------------------------------------------------

TEMPLATE = '''\
"""Runs {name}, from the capsule {file}. Written by `hcb reproduce --python`; edit it as you like.

What failed: {text}
  at {line}
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count={devices}")

import jax
import numpy as np

import hostcallback as hcb
from hostcallback.api.capsule.reproduce import arrays_of, load
from hostcallback.receiver import Capsule

capsule = Capsule({path!r})
program = load(capsule)  # a jax.export.Exported: print(program.mlir_module()) shows it
arrays = arrays_of(capsule, program.nr_devices)
inputs = dict(zip([entry.path for entry in capsule.inputs], arrays, strict=True))
# The inputs:
{inputs}

# Change inputs here, such as: inputs[{first!r}] = np.zeros_like(inputs[{first!r}])
# Receive taps with: hcb.bind("name", function)

with hcb.outfeed_receiver():
    results = jax.block_until_ready(jax.jit(program.call)(*inputs.values()))
for result in results:
    print(result.shape, result.dtype, "finite" if np.isfinite(np.asarray(result)).all() else "NOT FINITE")
'''


def script_of(capsule: Capsule) -> str:
    """Returns the script for a capsule. Texts from the capsule are comments or literals in it, never code."""
    failure = capsule.failure
    inputs = "\n".join(
        f"#   {_comment(entry.path)}: {entry.dtype}{list(entry.shape)}" for entry in capsule.inputs
    )
    devices = capsule.about.get("devices")
    return TEMPLATE.format(
        name=_comment(capsule.name),
        file=_comment(capsule.path.name),
        text=_comment(failure.text),
        line=_comment(failure.source_line),
        devices=min(len(devices), 4096) if isinstance(devices, list) else 1,
        path=str(Path(capsule.path).resolve()),
        inputs=inputs or "#   none",
        first=capsule.inputs[0].path if capsule.inputs else "",
    )


def _comment(text: str) -> str:
    # On one line, and without what would end a docstring.
    shown = text[:1000].encode("unicode_escape").decode("ascii")
    return shown.replace('"', "'")
