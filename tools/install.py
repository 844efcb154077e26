"""Installs the checkout with some extras into a virtual environment, and says what it does: used by the Makefile.

`python tools/install.py VENV EXTRA...` makes the environment if there is none or if its Python does not run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402

PROBE = "import pip, sys; sys.exit(sys.version_info < (3, 11))"


class InstallError(RuntimeError):
    """Nothing can be installed; the text says why and what to do."""


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def is_usable(venv: Path) -> bool:
    """Whether the environment has a Python that runs, is new enough and has pip."""
    try:
        probed = subprocess.run([venv / "bin" / "python", "-c", PROBE], capture_output=True, check=False)
    except OSError:
        return False
    return probed.returncode == 0


def make_environment(venv: Path) -> None:
    """Makes the environment unless there is one that can be used.

    Raises:
        InstallError: it cannot be made.
    """
    if is_usable(venv):
        return
    version = ".".join(map(str, sys.version_info[:3]))
    if venv.exists():
        say(f"{venv} cannot be used: its Python does not run, is too old, or has no pip. It is replaced")
        shutil.rmtree(venv.resolve())
    say(f"making the virtual environment {venv} with Python {version}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", venv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode:
        raise InstallError(f"{made.stdout}{venv} could not be made (on Debian: apt install python3-venv)")


def check_compiler() -> None:
    """Finds the compiler, before anything is downloaded.

    Raises:
        InstallError: there is none, and the native library is wanted.
    """
    if build_native.is_wanted():
        try:
            build_native.find_compiler()
        except build_native.BuildError as error:
            raise InstallError(str(error)) from None


def install(venv: Path, extras: list[str]) -> None:
    """Installs the checkout, editable, with its dependencies and the extras.

    Raises:
        InstallError: pip failed.
    """
    wanted = ",".join(extras)
    say(f"installing hostcallback with JAX and the packages of [{wanted}] into {venv}")
    line = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--no-compile",
        "--progress-bar",
        "off",
        "--no-color",
    ]
    line += ["--editable", f"{ROOT}[{wanted}]"]
    shown: list[str] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for text in pip.stdout:
            shown.append(text)
            told = progress(text)
            if told:
                say(f"  {told}")
    if pip.returncode:
        output = "".join(shown)
        reasons = re.findall(r"^ *error: (hostcallback: .*)$", output, re.MULTILINE)
        raise InstallError(
            output + (reasons[-1] if reasons else f"pip could not install hostcallback[{wanted}]")
        )


def progress(line: str) -> str:
    """What a line of pip's output tells the user; empty for most lines."""
    loaded = re.match(
        r"\s*(?:Downloading|Using cached) (?:\S*/)?([\w.]+)-([\w.]+)-\S+ \(([\d.]+ [MG]B)\)", line
    )
    if loaded:
        return f"{loaded[1]} {loaded[2]} ({loaded[3]})"
    if re.match(r"\s*Building editable for hostcallback .*started", line):
        return "compiling the native library" if build_native.is_wanted() else ""
    installing = re.match(r"Installing collected packages: (.*)", line)
    return f"writing {len(installing[1].split(', '))} packages" if installing else ""


def main(arguments: list[str]) -> int:
    """Installs, and returns the exit status."""
    if len(arguments) < 2:
        print("usage: python tools/install.py VENV EXTRA...", file=sys.stderr)
        return 2
    venv, since = Path(arguments[0]), time.monotonic()
    try:
        check_compiler()
        make_environment(venv)
        install(venv, arguments[1:])
    except InstallError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    say(f"installed in {time.monotonic() - since:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
