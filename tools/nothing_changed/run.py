"""Runs the matrix of "nothing changed" and writes docs/nothing-changed.md.

    python -m tools.nothing_changed [--programs A,B] [--features A,B] [--jobs N] [--keep FOLDER] [--no-write]

Exits with 1 if something is not the same and has no explanation in tools/nothing_changed/report.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tools.nothing_changed.cell import PROGRAMS, ROOT
from tools.nothing_changed.compare import Run, differences
from tools.nothing_changed.features import BARE, COLLECTOR, FEATURES, Feature, named
from tools.nothing_changed.report import Cell, Difference, Matrix

REPORT = ROOT / "docs" / "nothing-changed.md"
LIBRARIES = ROOT / "tests" / "libraries"
TIMEOUT_SEC = 900
TEST = """\
from tools.nothing_changed.cell import run


def test_program():
    run({program!r}, "bare")
"""


def cell(program: str, name: str, cache: Path | None, folder: Path) -> Run:
    """Runs one process in a separate folder, or reads what it left there before.

    Args:
        program: the program.
        name: the feature; "pytest" and "pytest bare" run the program in a test, with and without the plugin.
        cache: a persistent compilation cache, whose entries the process finds.
        folder: of the process.
    """
    keys = {file.name for file in cache.iterdir()} if cache else set()
    if (folder / "status").exists():
        return Run.read(folder, keys)
    shutil.rmtree(folder, ignore_errors=True)
    for room in ("cache", "programs"):
        (folder / room).mkdir(parents=True)
    for key in keys:
        shutil.copy(cache / key, folder / "cache" / key) if cache else None
    command = ["-m", "tools.nothing_changed.cell", program, name]
    if name.startswith("pytest"):
        (folder / "test_cell.py").write_text(TEST.format(program=program), encoding="utf-8")
        plugin = ["-p", "hostcallback_pytest"] if name == "pytest" else []
        # Installed, the plugin would be there in both.
        command = [
            "-m",
            "pytest",
            "-q",
            "-s",
            "-c",
            os.devnull,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hostcallback",
        ]
        command += [*plugin, "test_cell.py"]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=TIMEOUT_SEC, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    for file, text in (("stdout", done.stdout), ("stderr", done.stderr), ("status", str(done.returncode))):
        (folder / file).write_text(text, encoding="utf-8")
    return Run.read(folder, keys)


def environment() -> dict[str, str]:
    """Of a process. The folders are relative: the cache's is part of its keys."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("HOSTCALLBACK_", "XLA_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, LIBRARIES])),
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": "0",  # numpyro traces in the order of a set
        "JAX_DUMP_IR_TO": "programs",
        "JAX_DUMP_IR_MODES": "stablehlo",
        "JAX_COMPILATION_CACHE_DIR": "cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def row_of(program: str, features: Mapping[str, Feature], folder: Path, jobs: int) -> dict[str, Cell | None]:
    """The cells of a program by feature, and of the program once more without one, as "bare"."""
    cold = cell(program, "bare", None, folder / "cold")
    cache = folder / "cold" / "cache"
    names = ["bare", *(["pytest bare"] if "pytest" in features else []), *features]

    def started(name: str) -> Run:
        return cell(program, name, cache, folder / name.replace(" ", "_").replace(":", "_"))

    with ThreadPoolExecutor(jobs) as pool:
        runs = dict(zip(names, pool.map(started, names), strict=True))
    bare = runs["bare"]
    if not cold.observed or not bare.observed:
        raise RuntimeError(f"{program} fails without hostcallback:\n{cold.errors}{bare.errors}")
    found: dict[str, Cell | None] = {"bare": compared(BARE, cold, bare, cold)}
    for name, feature in features.items():
        reference = runs["pytest bare" if name == "pytest" else "bare"]
        needed = not feature.needs or bare.observed[feature.needs]
        # Programs with taps are compiled; the others are in the cache.
        found[name] = (
            compared(feature, reference, runs[name], cold if feature.taps else reference) if needed else None
        )
    return found


def compared(feature: Feature, reference: Run, run: Run, timed: Run) -> Cell:
    """The cell of two runs; `timed` is the one whose processor time counts."""
    ratio = run.processor_sec / timed.processor_sec if run.observed else float("nan")
    return Cell([Difference(*difference) for difference in differences(feature, reference, run)], ratio)


@contextlib.contextmanager
def collector(folder: Path) -> Iterator[None]:
    """A collector for `forward`, whose address the processes find in their environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as log, (folder / "collector").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hostcallback.receiver.cli", "collect", "--listen", address, "--log", log],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.environ[COLLECTOR] = address
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def run(programs: Sequence[str], features: Mapping[str, Feature], folder: Path, jobs: int = 2) -> Matrix:
    """Runs the cells of the given programs and features, and prints what is not the same."""
    matrix = Matrix(features)
    folder.mkdir(parents=True, exist_ok=True)
    with collector(folder):
        for program in programs:
            matrix.rows[program] = row_of(program, features, folder / program, jobs)
            cells = [cell for cell in matrix.rows[program].values() if cell is not None]
            same = sum(not cell.differences for cell in cells)
            print(f"{program}: {same} of {len(cells)} the same", flush=True)
    for line in matrix.unexplained():
        print(f"NOT EXPLAINED: {line}")
    return matrix


def versions() -> str:
    """Of Python, JAX and what the programs are of."""
    names = sorted(requirement.partition("==")[0] for requirement in requirements())
    return f"Python {platform.python_version()}, JAX {version('jax')}, " + ", ".join(
        f"{name} {version(name)}" for name in names
    )


def requirements() -> list[str]:
    """The libraries that are pinned for the programs, in setup.cfg."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    _, _, extra = text.partition("\nnothing-changed =\n")
    lines = extra.partition("\n# ")[0].splitlines()
    return [line.strip() for line in lines if "==" in line]


def main(argv: list[str] | None = None) -> int:
    """Runs the matrix; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", default="", help="names in tests/libraries/programs, with commas")
    parser.add_argument(
        "--features", default="", help="names in tools/nothing_changed/features.py, with commas"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--keep", type=Path, help="a folder for what the processes leave; those found there do not run again"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(argv)
    programs = (
        options.programs.split(",")
        if options.programs
        else [p.stem for p in sorted(PROGRAMS.rglob("*.py"), key=lambda p: p.stem)]
    )
    features = {name: named(name) for name in options.features.split(",")} if options.features else FEATURES
    with tempfile.TemporaryDirectory() as folder:
        matrix = run(
            programs, features, options.keep.absolute() if options.keep else Path(folder), options.jobs
        )
    page = matrix.page(versions())
    print(page)
    if not options.no_write:
        REPORT.write_text(page, encoding="utf-8")
    return 1 if any(matrix.unexplained()) else 0
