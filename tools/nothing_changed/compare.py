"""What is not the same in two runs of a program, and the differences that are explained."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.nothing_changed.cell import OBSERVATION, PROGRAMS, RESULTS
from tools.nothing_changed.features import Feature

BARRIER = ("jit_barrier_copy", "jit_hold")
"""Programs of a barrier, which may be called from anywhere."""
LOCATION = re.compile(r"\s*loc\((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\))*\)")


@dataclass
class Run:
    """What a process of the matrix left.

    Attributes:
        observed: what the process wrote down.
        output: its standard output.
        errors: its standard error output.
        status: its exit status.
        programs: the lowered text of each program, without locations, by name.
        own: how many programs of each name were not called by the program that is looked at, but by the feature itself.
        new_keys: the entries that it added to the persistent cache.
        arrays: its results, in the order of their hashes in `observed`; of numpy's types.
    """

    observed: dict[str, Any]
    output: str
    errors: str
    status: int
    programs: dict[str, list[str]] = field(default_factory=dict)
    own: Counter[str] = field(default_factory=Counter)
    new_keys: list[str] = field(default_factory=list)
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, keys: set[str]) -> Run:
        """Reads the folder of a process; `keys` are the entries that its persistent cache had before."""

        def text(name: str) -> str:
            path = folder / name
            return path.read_text(encoding="utf-8") if path.exists() else ""

        observed = json.loads(text(OBSERVATION) or "{}")
        programs: dict[str, list[str]] = {}
        own: Counter[str] = Counter()
        for file in sorted((folder / "programs").glob("*.mlir")):
            name = re.sub(r"^jax_ir\d+_|_compile\.mlir$", "", file.name)
            lowered = file.read_text(encoding="utf-8")
            programs.setdefault(name, []).append(comparable(lowered))
            own[name] += name in BARRIER or str(PROGRAMS.parent) not in lowered
        return cls(
            observed=observed,
            output=re.sub(r"in [\d.]+s( \([\d:]+\))?", "", text("stdout")),
            errors=masked(text("stderr")),
            status=int(text("status")),
            programs=programs,
            own=own,
            new_keys=sorted({*observed.get("keys", ())} - keys),
            arrays=_arrays(folder / RESULTS),
        )

    @property
    def processor_sec(self) -> float:
        """Seconds of processor time of the program, compiling included."""
        return float(self.observed["seconds"][0])

    def tapped(self) -> Counter[str]:
        """How many programs of each name have taps."""
        return Counter({name: sum(map(has_taps, texts)) for name, texts in self.programs.items()})


def _arrays(file: Path) -> list[np.ndarray[Any, Any]]:
    if not file.exists():
        return []
    with np.load(file) as found:
        return [found[f"arr_{number}"] for number in range(len(found.files))]


def _as_computed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # A Python float of a float32, such as a loss, has the precision of that.
    single = array.astype(np.float32) if array.dtype == np.float64 else array
    return single if np.array_equal(single, array, equal_nan=array.dtype.kind == "f") else array


def ulps(before: Sequence[np.ndarray[Any, Any]], after: Sequence[np.ndarray[Any, Any]]) -> float:
    """The largest difference of floating-point arrays, in units in the last place of the largest value of their type.

    Infinite where others differ, or where shapes, types or NaNs do.
    """
    before, after = list(map(_as_computed, before)), list(map(_as_computed, after))
    most, largest = 0.0, Counter[Any]()
    for one in before:
        if one.dtype.kind in "fc" and np.isfinite(one).any():
            largest[one.dtype] = max(largest[one.dtype], np.max(np.abs(one[np.isfinite(one)])))
    for one, other in zip(before, after, strict=True):
        if one.tobytes() == other.tobytes():
            continue
        is_alike = one.shape == other.shape and one.dtype == other.dtype and one.dtype.kind in "fc"
        if not is_alike or not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return math.inf
        found = np.isfinite(one)
        distance = float(np.max(np.abs(one[found] - other[found]), initial=0))
        most = max(most, distance / float(np.spacing(largest[one.dtype])))
    return most


def masked(text: str) -> str:
    """A standard error output without times, addresses and process numbers."""
    return re.sub(r"\d+\.\d+|0x[0-9a-f]+|\d{4,}", "#", text)


def comparable(text: str) -> str:
    """The text of a program without the places in source code, and without the addresses of Python callbacks."""
    kept = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r"\d{9,}", "#", "\n".join(LOCATION.sub("", line) for line in kept))


def has_taps(text: str) -> bool:
    """Whether a lowered program has taps."""
    return "@hostcallback_" in text


def differences(feature: Feature, bare: Run, run: Run) -> Iterator[tuple[str, ...]]:
    """What is not as in the bare run: a short name of the kind, the details, and of results by how much."""
    if run.status != bare.status:
        yield "exit status", f"{run.status}, not {bare.status}: {run.errors.strip().splitlines()[-1:]}"
    if not run.observed:
        yield "no result", run.errors.strip()[-2000:]
        return
    yield from _of_results(bare, run)
    if run.output != bare.output:
        yield "stdout", f"{run.output[-500:]!r}, not {bare.output[-500:]!r}"
    if run.errors != bare.errors and not feature.draws:
        yield "stderr", f"{run.errors[-1500:]!r}, not {bare.errors[-500:]!r}"
    if run.observed["exception"] != bare.observed["exception"]:
        yield "exception", f"{run.observed['exception']}, not {bare.observed['exception']}"
    if run.observed["calls"] != bare.observed["calls"]:
        yield "traces", f"the traced code ran {run.observed['calls']} times, not {bare.observed['calls']}"
    for kind in ("traces", "lowerings"):
        yield from ((kind, text) for text in _of_counts(feature, kind, bare, run))
    yield from _of_programs(feature, bare, run)


def _of_results(bare: Run, run: Run) -> Iterator[tuple[str, ...]]:
    before, after = bare.observed["results"], run.observed["results"]
    different = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if not different:
        return
    is_alike = [*before] == [*after] and len(bare.arrays) == len(run.arrays) == len(before)
    most = ulps(bare.arrays, run.arrays) if is_alike else math.inf
    amount = "" if math.isinf(most) else f"{most:.1g} ulp" if most < 1 else f"{round(most):,} ulp"
    yield "results", f"{len(different)} of {len(before)} arrays, such as {different[0]}; {amount}", amount


def _of_counts(feature: Feature, kind: str, bare: Run, run: Run) -> Iterator[str]:
    ours, theirs = run.observed[kind], bare.observed[kind]
    # A feature with taps traces and lowers its functions, and JAX's: of the user's functions it may not.
    users = {name for function in bare.observed["functions"] for name in (function, f"jit({function})")}
    for name in sorted(({*ours, *theirs} & users) if feature.taps else {*ours, *theirs}):
        more = ours.get(name, 0) - theirs.get(name, 0)
        if not 0 <= more <= own_programs(bare, run)[program_name(name)]:
            yield f"{name}: {ours.get(name, 0)}, not {theirs.get(name, 0)}"


def own_programs(bare: Run, run: Run) -> Counter[str]:
    """How many programs of each name the feature runs itself."""
    return run.own - bare.own


def program_name(function: str) -> str:
    """The name of the program of a function, as JAX makes it: `jit(<lambda>)` is `jit__lambda`."""
    return "jit_" + re.sub(r"^jit\(|\)$", "", function).replace("<lambda>", "_lambda")


def _of_programs(feature: Feature, bare: Run, run: Run) -> Iterator[tuple[str, str]]:
    tapped, of_feature = run.tapped(), own_programs(bare, run)
    for name in sorted({*bare.programs, *run.programs}):
        before, own = bare.programs.get(name, []), of_feature[name]
        ours, theirs = Counter(run.programs.get(name, [])), Counter(before)
        lost, more = theirs - ours, Counter({t: n for t, n in (ours - theirs).items() if not has_taps(t)})
        # `accelerate` makes taps of the callbacks that there are.
        if not feature.taps and tapped[name] > own + sum("callback" in text for text in before):
            yield "programs", f"{name} has taps"
        elif sum(lost.values()) > tapped[name]:
            yield "programs", f"{name} has another text"
        elif sum(more.values()) > own:
            yield "programs", f"{sum(more.values())} more of {name}"
    keys = Counter(key.rpartition("-")[0].rpartition("-")[0] for key in run.new_keys)
    for name, count in keys.items():
        if count > tapped[name] + of_feature[name]:
            yield "cache keys", f"{count} new entries {name}"
