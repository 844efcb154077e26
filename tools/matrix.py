"""Runs the tests on the oldest, the default and the newest pair of Python and JAX that can be had here.

One wheel is built, and each pair gets it in a separate virtual environment under .matrix/: so the tests also prove that
one build of the native library serves every Python and every jaxlib. Exits with 1 if any pair failed.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
TRANSPORTS = ("native", "callback")
ROOMS = (
    "api/taps",
    "api/calls",
    "api/checks",
    "api/accelerate",
    "api/debug",
    "lifecycle",
    "sync",
    "lowering",
    "primitives",
    "host_callback",
)
"""Folders of tests in which JAX's version matters. A new Python runs the others too, on the native transport, but for
those of the documents and of the project's own tools."""
LATER = ("examples", "hostile", "libraries", "receiver/cli", "receiver/remote", "receiver/ui")
"""Of those others, what `--quick` leaves out on a new Python: they use it as the rest of the receiver does."""
CALLBACK_ROOMS = tuple(room for room in ROOMS if room not in ("primitives", "host_callback", "api/debug"))
"""Those in which it matters to the callback transport: in the others, what depends on it is no transport."""
NEWEST_MINOR = 20
"""Up to which Python 3 minor version interpreters are looked for by name."""

PROBE = "import ensurepip, sys, venv; print(sys.version_info[0], sys.version_info[1])"
Version = tuple[int, int]


class Interpreter(NamedTuple):
    """A Python that can make virtual environments."""

    version: Version
    path: str

    def __str__(self) -> str:
        return "{}.{}".format(*self.version)


@dataclass
class Pair:
    """One Python with one JAX, and how its tests went.

    Attributes:
        name: oldest, default or newest.
        jax: the requirement given to pip; without a version, the newest that pip offers to this Python.
        installed: the versions of Python and JAX that were installed.
        results: per transport, pytest's closing line or the error before it.
    """

    name: str
    interpreter: Interpreter
    jax: Sequence[str]
    installed: str = ""
    results: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    seconds: float = 0.0


def probe(path: str) -> Interpreter | None:
    """The interpreter at `path`, or None if it does not run (as pyenv's shims may not) or has no venv."""
    try:
        result = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    major, minor = result.stdout.split()
    return Interpreter((int(major), int(minor)), path)


def pyenv_root() -> Path:
    """The folders where pyenv keeps its interpreters, whether or not it is set up in this shell."""
    if named := os.environ.get("PYENV_ROOT"):
        return Path(named)
    if pyenv := shutil.which("pyenv"):
        result = subprocess.run([pyenv, "root"], capture_output=True, text=True)
        if result.returncode == 0:
            return Path(result.stdout.strip())
    return Path.home() / ".pyenv"


def candidates(minimum: Version) -> Iterator[str]:
    """Paths at which interpreters may be: by name on PATH, then pyenv's."""
    for minor in range(NEWEST_MINOR, minimum[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            yield found
    yield from map(str, sorted((pyenv_root() / "versions").glob("3.*/bin/python3")))


def find_interpreters(minimum: Version) -> list[Interpreter]:
    """One interpreter per version from `minimum` on, oldest first; the running one among them."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    found = {sys.version_info[:2]: Interpreter(sys.version_info[:2], base)}
    for path in candidates(minimum):
        interpreter = probe(path)
        if interpreter and interpreter.version >= minimum:
            found.setdefault(interpreter.version, interpreter)
    return sorted(found.values())


def supported() -> tuple[Version, str]:
    """The oldest Python and the oldest JAX that setup.cfg allows."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    python = re.search(r">=\s*(\d+)\.(\d+)", config["options"]["python_requires"])
    jax = re.search(r"^jax>=\s*([\d.]+)$", config["options"]["install_requires"], re.MULTILINE)
    if not python or not jax:
        raise SystemExit(
            "matrix: setup.cfg should say python_requires = >=3.N and jax>=N.N.N in install_requires"
        )
    return (int(python[1]), int(python[2])), jax[1]


def plan(interpreters: Sequence[Interpreter], minimum: Version, jax: str) -> list[Pair]:
    """The pairs to run; prints the pairs that had to be left out."""
    oldest = interpreters[0]
    default = next(i for i in interpreters if i.version == sys.version_info[:2])
    if oldest.version != minimum:
        print(
            "matrix: MISSING: no Python {}.{} on PATH or under pyenv; ".format(*minimum)
            + f"the oldest JAX is tested on {oldest} instead"
        )
    pairs = [
        Pair("oldest", oldest, (f"jax=={jax}", f"jaxlib=={jax}")),
        Pair("default", default, ("jax",)),
    ]
    newer = [i for i in reversed(interpreters) if i.version > default.version]
    newest = next((i for i in newer if has_jax(i)), None)
    if newest:
        pairs.append(Pair("newest", newest, ("jax",)))
    else:
        print(
            f"matrix: MISSING: no Python newer than {default} that JAX supports, on PATH or under "
            "pyenv; the newest pair is the default one"
        )
    return pairs


def has_jax(interpreter: Interpreter) -> bool:
    """Whether pip offers this Python a built jaxlib; prints a note if not. A release too new has none yet."""
    folder = FOLDER / "newest"
    subprocess.run([interpreter.path, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    result = subprocess.run([*pip, "--only-binary=:all:", "jaxlib"], capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip failed"]
        print(f"matrix: passed over Python {interpreter}: pip offers it no jaxlib ({reason[0]})")
    return result.returncode == 0


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Runs a command in the checkout, its output passed through; returns the last line of it.

    Raises:
        subprocess.CalledProcessError: it failed; `output` is that line.
    """
    print("+", *(f"{k}={v}" for k, v in environment.items()), *command, flush=True)
    last = ""
    with subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(map(str, command)), last)
    return last


def build_wheel() -> Path:
    """Builds the one wheel that every pair gets."""
    folder = FOLDER / "wheel"
    for stale in (folder, ROOT / "build"):  # setuptools would pack files that an older build left there
        shutil.rmtree(stale, ignore_errors=True)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, "."])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(pair: Pair, wheel: Path) -> Path:
    """Makes the pair's environment afresh and installs wheel, JAX and test tools; returns its Python."""
    folder = FOLDER / pair.name
    run([pair.interpreter.path, "-m", "venv", "--clear", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", *pair.jax])
    return python


def run_tests(pair: Pair, wheel: Path, pytest_arguments: Sequence[str], is_quick: bool = False) -> None:
    """Installs one pair and runs the tests on it, on every transport; stores the outcome in the pair."""
    started = time.monotonic()
    try:
        python = install(pair, wheel)
        versions = "import jax, platform as p; print(p.python_version(), jax.__version__)"
        pair.installed = run([python, "-c", versions])
    except (subprocess.CalledProcessError, OSError) as error:
        pair.failed = True
        pair.results["installation"] = f"failed: {getattr(error, 'output', error)}"
        return
    for transport in TRANSPORTS:
        # Safe path: the tests must find the installed wheel, not the checkout that contains them.
        command = [python, "-P", "-m", "pytest", "-q", "-n", "3", "--dist", "worksteal", "-m", "not slow"]
        everything = transport == "native" and pair.interpreter.version != sys.version_info[:2]
        rooms = ROOMS if transport == "native" else CALLBACK_ROOMS
        left_out = ("project", *(LATER if is_quick else ()))
        command += pytest_arguments or (
            [f"--ignore=tests/{room}" for room in left_out]
            if everything
            else [f"tests/{room}" for room in rooms]
        )
        environment = {
            "HOSTCALLBACK_TRANSPORT": transport,
            "TEST_COMPILATION": "full",
            "PYTHONSAFEPATH": "1",
        }
        try:
            pair.results[transport] = run(command, **environment).strip("=+ ")
        except subprocess.CalledProcessError as error:
            pair.failed = True
            pair.results[transport] = f"FAILED: {error.output.strip('=+ ')}"
    pair.seconds = time.monotonic() - started


def table(pairs: Sequence[Pair]) -> str:
    """A line per pair and transport."""
    rows = [("pair", "Python", "JAX", "transport", "result")]
    for pair in pairs:
        python, _, jax = pair.installed.partition(" ")
        versions = (python or str(pair.interpreter), jax or " ".join(pair.jax))
        rows += [(pair.name, *versions, name, text) for name, text in pair.results.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def main() -> int:
    """Runs the matrix; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="only say which pairs would run")
    parser.add_argument(
        "--only", choices=["oldest", "default", "newest"], action="append", help="run these pairs"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"on a new Python leave out tests/{{{','.join(LATER)}}}, as CI does",
    )
    parser.add_argument("pytest_arguments", nargs="*", help="passed to pytest, after --")
    options = parser.parse_args()

    minimum, jax = supported()
    pairs = plan(find_interpreters(minimum), minimum, jax)
    if options.only:
        pairs = [pair for pair in pairs if pair.name in options.only]
    for pair in pairs:
        print(f"{pair.name}: Python {pair.interpreter} ({pair.interpreter.path}), {pair.jax[0]}")
    if options.list:
        return 0
    wheel = build_wheel()
    for pair in pairs:
        print(f"\n==== {pair.name}: Python {pair.interpreter}, {' '.join(pair.jax)}", flush=True)
        run_tests(pair, wheel, options.pytest_arguments, options.quick)
    print(f"\n{table(pairs)}")
    failed = [pair.name for pair in pairs if pair.failed]
    print(f"matrix: {len(pairs) - len(failed)} of {len(pairs)} pairs passed")
    return 1 if failed or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
