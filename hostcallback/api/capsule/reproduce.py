"""Runs the program of a capsule on its inputs, and compares what fails with what the capsule says."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.export

from hostcallback.api.barrier import barrier_wait
from hostcallback.api.capsule.program import placed
from hostcallback.api.export import bind
from hostcallback.api.failures.failures import described
from hostcallback.api.receiver import outfeed_receiver
from hostcallback.receiver.capsule.file_format import PROGRAM, CapsuleError, Failure, Input
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


def arrays_of(capsule: Capsule) -> list[Any]:
    """Returns the inputs on this process's devices, partitioned as they were.

    Raises:
        CapsuleError: some were left out, or need more devices.
    """
    missing = [entry for entry in capsule.inputs if entry.left_out]
    if missing:
        raise CapsuleError(
            f"{capsule.path}: {len(missing)} input(s) are not in the capsule, such as {missing[0].path}: "
            f"{missing[0].left_out}"
        )
    most = max((_devices_of(entry.mesh) for entry in capsule.inputs), default=1)
    if most > len(jax.devices()):
        raise CapsuleError(
            f"{capsule.path}: the program ran on {most} devices, and there are {len(jax.devices())}: on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={most}"
        )
    return [_placed(capsule, entry) for entry in capsule.inputs]


def _placed(capsule: Capsule, entry: Input) -> Any:
    has, whole = sum(math.prod(shard.shape) for shard in entry.shards), math.prod(entry.shape)
    if not entry.shards or has != whole:
        raise CapsuleError(f"{capsule.path}: {entry.path} has {has:,} of its {whole:,} elements")
    try:
        return placed(entry, functools.partial(capsule.array, entry))
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


def reproduce(capsule: Capsule, bindings: Mapping[str, Callable[..., Any]] | None = None) -> Reproduction:
    """Runs the program of a capsule. Prints, logs and checks in it do what they do.

    Args:
        capsule: the capsule.
        bindings: functions for its taps by name, see `hcb.bind`; other taps do nothing.

    Raises:
        CapsuleError: it cannot be run here.
    """
    exported, arrays = load(capsule), arrays_of(capsule)
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
    return _compared(capsule.failure, found, last, results)


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
