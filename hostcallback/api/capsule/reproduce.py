"""Runs the program of a capsule, and compares what fails with the capsule; writes a script; bisects two runs."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from hostcallback.api import barrier, capsule_contents, export, receiver
from hostcallback.api.capsule.programs import Digest, arrays_of, digests, first_line, load, not_finite_text
from hostcallback.receiver import limits
from hostcallback.receiver.capsule.file_format import PROMOTED, CapsuleError, Failure
from hostcallback.receiver.capsule.reading import Capsule
from hostcallback.receiver.errors import TapFailure, TapFunctionException
from hostcallback.receiver.failures import deferred_errors
from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.messages import Message
from hostcallback.receiver.text import printable


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
    results: list[jax.Array]


# ---- Running it ------------------------------------------------------------------------------------------------------


def reproduce(capsule: Capsule, bindings: Mapping[str, Callable[..., Any]] | None = None) -> Reproduction:
    """Runs the program of a capsule. Its prints, logs and checks work as in the original run.

    `bindings` has functions for its taps by name, see `hcb.bind`; other taps do nothing.

    Raises:
        CapsuleError: it cannot be run here.
    """
    exported = load(capsule)
    arrays = arrays_of(capsule, exported.nr_devices)
    for name, func in (bindings or {}).items():
        export.bind(name, func)
    last: dict[str, Any] = {}

    def keep(message: Message) -> None:
        last[message.consumer.name] = message.consumer.unflatten(message.arrays)

    found: list[FailedCheck | TapFailure] = []
    notice = found.append  # one object: each access makes another
    deferred_errors.listen(notice)
    results: list[jax.Array] = []
    try:
        with receiver.outfeed_receiver(sinks=[keep]):
            results = jax.jit(exported.call)(*arrays)
            jax.block_until_ready(results)
            barrier.barrier_wait()
    except TapFunctionException:
        pass  # `found` has them, and what nothing is bound to is no failure
    except Exception as error:
        if not found:  # `on_error="abort"` and breakpoints end a program too
            raise CapsuleError(
                f"{capsule.path}: the program does not run here: {first_line(error)}"
            ) from None
    finally:
        deferred_errors.ignore(notice)
    result = _compared(capsule.failure, found, last, results)
    if result.same is None and capsule.failure.kind == "nonfinite":
        return _not_finite(capsule, result, arrays)
    return result


def _compared(
    expected: Failure, found: list[FailedCheck | TapFailure], last: dict[str, Any], results: list[jax.Array]
) -> Reproduction:
    failures = [capsule_contents.described(failure) for failure in found]
    reports = [
        f.report() if isinstance(f, FailedCheck) else "".join(traceback.format_exception(f.exception))
        for f in found
    ]
    alike = [f for f in failures if (f.kind, f.source_line) == (expected.kind, expected.source_line)]
    # The checks of another process have texts of one line and a limited length.
    text = printable(expected.text)[: limits.REPORT_CHARS]
    exact = [f for f in alike if printable(f.text)[: limits.REPORT_CHARS] == text]
    same = next(iter([*exact, *alike]), None)
    got = last.get(expected.name) if expected.kind == "tap exception" and same is None else None
    return Reproduction(failures, reports, same, bool(exact), got, results)


def operation_that_failed(operations: Sequence[Digest], failure: Failure) -> int | None:
    """The operation at which a step failed: its number among those of a run, or None if it is not known."""
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


def _not_finite(capsule: Capsule, result: Reproduction, arrays: list[jax.Array]) -> Reproduction:
    # The program itself does not test its values.
    expected = capsule.failure
    bad = [(entry.path, array) for entry, array in zip(capsule.inputs, arrays, strict=True) if _is_bad(array)]
    reports = [f"the input {path} has {not_finite_text(array)}" for path, array in bad[:1]]
    is_same = bool(bad) if expected.name.startswith("input") else any(map(_is_bad, result.results))
    operations = digests(capsule)
    number = operation_that_failed(operations, expected)
    if number is not None:
        digest, line = operations[number], expected.source_line.partition(" (")[0]
        low, high, *_ = digest.stats
        at = f", iteration {', '.join(map(str, digest.iterations))}" if digest.iterations else ""
        values = digest.not_finite or f"min {low:g}, max {high:g}"
        reports.append(f"not finite: {digest.name}{at}: {values}")
        if not expected.name.startswith(("input", "result")):
            is_same = f" at {line} (" in digest.name and digest.name.startswith(f"{_primitive(expected)} ")
    found = [*result.found, expected] if is_same else result.found
    reports = [*result.reports, *reports]
    return replace(result, found=found, reports=reports, same=expected if is_same else None, is_exact=is_same)


def _primitive(failure: Failure) -> str:
    # Of the name of an operation in reports.
    return failure.name.rpartition(", ")[2].removeprefix("cotangent of ")


def _is_bad(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact)) and not bool(jnp.isfinite(array).all())


def function_of(text: str) -> Callable[..., Any]:
    """Imports the function that `MODULE:NAME` stands for.

    Raises:
        ValueError: there is none.
    """
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(text)
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
from hostcallback.api.capsule.programs import arrays_of, load
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


# ---- The operation at which two runs part ----------------------------------------------------------------------------

TOLERANCE = 1e-3
"""Largest relative difference of two precisions that is no divergence: some 10,000 times float32's precision."""

RUN_SEC = 3600.0
MAX_DIGESTS_BYTES = 1 << 30


@dataclass(frozen=True)
class Divergence:
    """The first operation that differs.

    Attributes:
        left: of the first run.
        right: of the second run.
        compared: number of operations that were the same before it.
        relative: largest difference of a statistic, relative to the larger magnitude.
    """

    left: Digest
    right: Digest
    compared: int
    relative: float


def first_divergence(
    left: Sequence[Digest], right: Sequence[Digest], tolerance: float
) -> tuple[Divergence | None, int, int]:
    """Compares two runs in the order of the first, up to a relative difference of `tolerance`; 0 compares bits.

    Returns:
        The first operation that differs, or None; the number of operations compared before it; and of those that only
        one run has.
    """
    others = {(d.name, d.iterations, d.occurrence): d for d in right}
    compared = missing = 0
    for digest in left:
        other = others.get((digest.name, digest.iterations, digest.occurrence))
        if other is None:
            missing += 1
            continue
        relative = _relative(digest.stats, other.stats)
        if digest.hash != other.hash if not tolerance else not relative <= tolerance:
            return Divergence(digest, other, compared, relative), compared, missing
        compared += 1
    return None, compared, missing


def _relative(left: Sequence[float], right: Sequence[float]) -> float:
    # Relative to the largest magnitude in the array: small elements of a large array have its rounding errors.
    a, b = np.array(left), np.array(right)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    if alike.all():
        return 0.0
    scale = float(np.max(np.abs([a[:2], b[:2]])))
    if math.isnan(scale):  # an array with a NaN has no smallest and largest element
        scale = float(np.nanmax(np.abs([a, b])))
    with np.errstate(invalid="ignore"):  # infinite values
        difference = float(np.max(np.abs(np.where(alike, 0.0, a - b))))
    return difference / scale if scale else difference


def bisect(capsule: Capsule, against: str) -> tuple[Divergence | None, int, int]:
    """Runs the step twice and compares; see `first_divergence`.

    `against` is "float64"; "device:N", another device of this process; or the path of another Python, in which
    hostcallback and another JAX are installed.

    Raises:
        CapsuleError: one of the runs is not possible.
    """
    if against == "float64":
        return first_divergence(digests(capsule), digests(capsule, PROMOTED), TOLERANCE)
    if against.startswith("device:"):
        return first_divergence(digests(capsule), digests(capsule, device=_device(against)), 0.0)
    return first_divergence(digests(capsule), _digests_of_other(capsule, against), 0.0)


def _device(text: str) -> jax.Device:
    number, devices = text.partition(":")[2], jax.devices()
    if not number.isdecimal() or int(number) >= len(devices):
        raise CapsuleError(f"--bisect {text}: this process has the devices 0 to {len(devices) - 1}")
    return devices[int(number)]


def write_digests(capsule: Capsule, path: str) -> None:
    """Writes the digests of a run as JSON, for a process with another JAX."""
    # Without `bad` and `finite`: versions without these may read it.
    rows = [astuple(digest)[:5] for digest in digests(capsule)]
    Path(path).write_text(json.dumps(rows))


def _digests_of_other(capsule: Capsule, python: str) -> list[Digest]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digests.json")
        command = (python, "-m", "hostcallback.receiver.cli", "reproduce", "--digests", path, capsule.path)
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SEC, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CapsuleError(f"--bisect {python}: {error}") from None
        if result.returncode or not path.exists() or path.stat().st_size > MAX_DIGESTS_BYTES:
            last = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise CapsuleError(
                f"--bisect {python}: that Python could not run the capsule: {last}. It needs hostcallback and JAX"
            )
        return [
            Digest(name, tuple(iterations), occurrence, bits, tuple(stats))
            for name, iterations, occurrence, bits, stats in json.loads(path.read_text())
        ]
