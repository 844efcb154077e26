"""Reads a long recorded run as columns, and imports the package: time and peak of resident memory, each in a process.

python -m tools.scale.reading record FOLDER COUNT
python -m tools.scale.reading read FOLDER COUNT
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hostcallback as hcb
from tools.bench.machine import peak_mib
from tools.bench.servers import ROOT
from tools.soak.parts import environment

ROUND = 1_000_000
PEAKS, MORE_MIB = 3.0, 32.0
"""The peak may be a multiple of the size of the columns, and some MiB for what is being read."""

ROUNDS = 5
IMPORTS = """
import sys, time
import jax
from tools.bench.machine import peak_mib
jax.devices()
before, began = peak_mib(), time.perf_counter()
import hostcallback as hcb
if "used" in sys.argv:
    hcb.id_tap, hcb.outfeed_receiver, hcb.barrier_wait
print((time.perf_counter() - began) * 1e3, peak_mib() - before)
"""
"""Prints milliseconds and MiB beyond JAX and its devices."""


def record(folder: Path, count: int) -> None:
    """Records the numbers below `count`, float32."""
    import jax
    from jax import lax

    steps = min(ROUND, count)

    @jax.jit
    def emit(first: Any) -> Any:
        def step(number: Any, _: None) -> tuple[Any, None]:
            hcb.id_tap(len, number.astype(np.float32), batched=True, name="loss")
            return number + 1, None

        return lax.scan(step, first, None, length=steps)[0]

    number: Any = np.int32(0)
    with hcb.outfeed_receiver(record=folder):
        for _ in range(count // steps):
            number = emit(number)
        number.block_until_ready()
    print(time.process_time())


def read(folder: Path, count: int) -> None:
    """Reads them as columns; prints seconds, MiB of the columns, and MiB of the peak beyond the level before."""
    data = hcb.read(folder)
    loss = data["loss"]
    next(iter(loss))  # imports what reading needs
    before, began = peak_mib(), time.perf_counter()
    columns = loss.to_numpy()
    seconds, peak = time.perf_counter() - began, peak_mib() - before
    for start in range(0, count, ROUND):
        expected = np.arange(start, min(start + ROUND, count)).astype(np.float32)
        if not np.array_equal(columns["loss"][start : start + ROUND], expected):
            raise ValueError(f"the values from {start:,} on are not those that were recorded")
    if len(columns["loss"]) != count:
        raise ValueError(f"{len(columns['loss']):,} messages were read, expected {count:,}")
    print(seconds, sum(array.nbytes for array in columns.values()) / 2**20, peak)


def run(count: int) -> tuple[str, list[str]]:
    """Records and reads, and imports; returns a table, and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        began = time.perf_counter()
        _child("-m", "tools.scale.reading", "record", name, str(count))
        recorded = time.perf_counter() - began
        nbytes = sum(path.stat().st_size for path in folder.rglob("*.hcblog"))
        seconds, columns, peak = _child("-m", "tools.scale.reading", "read", name, str(count))
    # The first process of each compiles the modules.
    plain = [_child("-c", IMPORTS) for _ in range(ROUNDS + 1)][1:]
    used = [_child("-c", IMPORTS, "used") for _ in range(ROUNDS + 1)][1:]
    rows = [
        ("scalars that were recorded", f"{count:,}"),
        ("the process that recorded them, with its start", f"{recorded:.0f} s"),
        ("the log", f"{nbytes / 2**30:.1f} GiB"),
        ("`hcb.read(...)[name].to_numpy()`", f"{seconds:.1f} s"),
        ("its columns: step, time, value", f"{columns:,.0f} MiB"),
        ("peak of resident memory, beyond the level before", f"{peak:,.0f} MiB, {peak / columns:.2f} of the columns"),
        ("`import hostcallback`, after JAX and its devices", _median(plain)),
        ("with `hcb.id_tap`, `outfeed_receiver` and `barrier_wait` named", _median(used)),
    ]  # fmt: skip
    faults = []
    if peak > PEAKS * columns + MORE_MIB:
        faults.append(f"the peak is {peak / columns:.1f} times the columns, expected at most {PEAKS:g}")
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    ) + "\n", faults


def _median(found: list[list[float]]) -> str:
    taken, mib = (statistics.median(column) for column in zip(*found, strict=True))
    return f"{taken:.0f} ms, {mib:.1f} MiB"


def _child(*arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={name: text for name, text in environment().items() if name != "PYTHONDONTWRITEBYTECODE"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(number) for number in done.stdout.split()]


if __name__ == "__main__":
    {"record": record, "read": read}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
