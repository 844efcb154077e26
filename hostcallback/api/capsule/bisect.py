"""Finds the first operation in which two runs of a capsule's step part: other devices, another JAX, 64 bits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hostcallback.api.capsule.reproduce import Digest, digests
from hostcallback.receiver.capsule.file_format import PROMOTED, CapsuleError
from hostcallback.receiver.capsule.reading import Capsule

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
