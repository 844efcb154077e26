"""Finds the first operation in which two runs of a capsule's step part: other devices, another JAX, 64 bits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.api.barrier import barrier_wait
from hostcallback.api.capsule.digests import TAP
from hostcallback.api.capsule.reproduce import arrays_of, load
from hostcallback.api.export import bind, unbind
from hostcallback.receiver.capsule.file_format import PROMOTED, WATCHED, CapsuleError, Failure
from hostcallback.receiver.capsule.reading import Capsule

TOLERANCE = 1e-3
"""Largest relative difference of two precisions that is no divergence: some 10,000 times float32's precision."""

RUN_SEC = 3600.0
MAX_DIGESTS_BYTES = 1 << 30


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


def digests(capsule: Capsule, program: str = WATCHED, device: Any = None) -> list[Digest]:
    """Runs a program of digests; returns what it sends, in program order.

    Args:
        capsule: the capsule.
        program: the member.
        device: where to run it; None for where the inputs are.

    Raises:
        CapsuleError: the program was left out, or cannot be run here.
    """
    exported, arrays = load(capsule, program), arrays_of(capsule)
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
        return next((n for n in bad if n in here), bad[0] if bad else None)
    taps = [n for n in here if operations[n].name.startswith("tap ")]
    if failure.kind == "check":  # the predicate of the one that failed is false
        taps = [n for n in taps if operations[n].stats[0] == 0.0]
    return taps[0] if taps else None


def first_divergence(
    left: Sequence[Digest], right: Sequence[Digest], tolerance: float
) -> tuple[Divergence | None, int, int]:
    """Compares two runs in the order of the first.

    Args:
        left: the digests of one run.
        right: of the other.
        tolerance: largest relative difference that is none; 0 compares bits.

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

    Args:
        capsule: the capsule.
        against: "float64"; "device:N", another device of this process; or the path of another Python, in which
            hostcallback and another JAX are installed.

    Raises:
        CapsuleError: one of the runs is not possible.
    """
    if against == "float64":
        return first_divergence(digests(capsule), digests(capsule, PROMOTED), TOLERANCE)
    if against.startswith("device:"):
        return first_divergence(digests(capsule), digests(capsule, device=_device(against)), 0.0)
    return first_divergence(digests(capsule), _digests_of_other(capsule, against), 0.0)


def _device(text: str) -> Any:
    number, devices = text.partition(":")[2], jax.devices()
    if not number.isdecimal() or int(number) >= len(devices):
        raise CapsuleError(f"--bisect {text}: this process has the devices 0 to {len(devices) - 1}")
    return devices[int(number)]


def write_digests(capsule: Capsule, path: str) -> None:
    """Writes the digests of a run as JSON, for a process with another JAX."""
    rows = [[d.name, d.iterations, d.occurrence, d.hash, d.stats] for d in digests(capsule)]
    Path(path).write_text(json.dumps(rows))


def _digests_of_other(capsule: Capsule, python: str) -> list[Digest]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digests.json")
        command = [
            python,
            "-m",
            "hostcallback.receiver.cli",
            "reproduce",
            "--digests",
            str(path),
            str(capsule.path),
        ]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=RUN_SEC, check=False, env={**os.environ}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CapsuleError(f"--bisect {python}: {error}") from None
        if result.returncode or not path.exists() or path.stat().st_size > MAX_DIGESTS_BYTES:
            last = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise CapsuleError(
                f"--bisect {python}: that Python could not run the capsule: {last}. It needs hostcallback and JAX"
            )
        rows = json.loads(path.read_text())
    return [
        Digest(name, tuple(iterations), occurrence, bits, tuple(stats))
        for name, iterations, occurrence, bits, stats in rows
    ]
