"""Compiles the native transport: `python tools/build_native.py` builds it next to its sources."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent.parent / "hostcallback" / "receiver" / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-pthread",
    "-Wall",
    "-Wextra",
)

LIBRARIES = ("-ldl",) if sys.platform == "linux" else ()  # a separate library before glibc 2.34


class BuildError(RuntimeError):
    """The native library could not be built; the message contains the cure."""


def is_wanted() -> bool:
    """Whether a build is to compile the library: `HOSTCALLBACK_BUILD_NATIVE` is not 0."""
    return os.environ.get("HOSTCALLBACK_BUILD_NATIVE", "1") != "0"


def library_name() -> str:
    """The library's file name on this platform."""
    return "libhostcallback.dylib" if sys.platform == "darwin" else "libhostcallback.so"


def find_compiler(compiler: str | None = None) -> list[str]:
    """The command of a C++ compiler: `compiler`, else `$CXX`, else the first of `COMPILERS` on the path.

    Raises:
        BuildError: there is none, or the one asked for does not exist.
    """
    wanted = compiler or os.environ.get("CXX")
    if wanted:
        command = shlex.split(wanted)
        if shutil.which(command[0]):
            return command
        raise BuildError(
            _cure(
                f"the C++ compiler {command[0]!r} (from {'CXX' if not compiler else 'the caller'}) was not found"
            )
        )
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(_cure(f"no C++ compiler was found (looked for $CXX, {', '.join(COMPILERS)})"))


def as_one_source(folder: Path) -> Path:
    """Writes a file that includes all sources, and returns its path.

    Compiled as one they take a third to a half of the time: most of each is the standard library's headers.
    """
    one = folder / "hostcallback.cc"
    names = sorted(path.relative_to(SOURCE_DIR).as_posix() for path in SOURCE_DIR.rglob("*.cc"))
    one.write_text("".join(f'#include "{name}"\n' for name in names), encoding="utf-8")
    return one


def compile_native(output: Path, compiler: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """Compiles all sources into the shared library `output` and returns its path.

    Args:
        output: the file to write; it appears whole or not at all.
        compiler: a command, with flags if need be; None for `$CXX` or the first one found.
        extra_flags: added behind the usual flags, such as `-Werror` or a sanitizer.

    Raises:
        BuildError: there is no compiler, or it failed (its output is in the message).
    """
    command = find_compiler(compiler)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Under a temporary name first: a running process may have the old file mapped.
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="hostcallback-build-") as folder:
            source = str(as_one_source(Path(folder)))
            line = [*command, *FLAGS, *extra_flags, f"-I{SOURCE_DIR}", source, *LIBRARIES, "-o", str(partial)]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(
                _cure(f"compiling the native transport failed:\n{shlex.join(line)}\n{done.stderr.strip()}\n")
            )
        if done.stderr:
            print(done.stderr, file=sys.stderr)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output


def _cure(problem: str) -> str:
    return (
        f"hostcallback: {problem}. Install a C++17 compiler (Debian: apt install g++) or name one in CXX; or build "
        "without the native transport (slower: taps then run through Python callbacks): "
        "HOSTCALLBACK_BUILD_NATIVE=0 pip install . (in a checkout: HOSTCALLBACK_BUILD_NATIVE=0 make demo)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Builds in place, or to the path given with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=SOURCE_DIR / library_name())
    parser.add_argument("--compiler", help="a compiler command instead of $CXX, c++, g++ or clang++")
    parser.add_argument("--dev", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--sanitize", metavar="KIND", help="build with -fsanitize=KIND, such as thread or address"
    )
    args = parser.parse_args(argv)
    extra = ["-Werror"] if args.dev else []
    if args.sanitize:
        extra += [f"-fsanitize={args.sanitize}", "-g", "-O1"]
    try:
        print(compile_native(args.output, args.compiler, extra))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
