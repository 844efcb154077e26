"""Makes the environment of the libraries, and finds their tests: in a folder of checkouts, or in their sdists."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tools.upstream.libraries import JAX, Library
from tools.upstream.settings import ROOT

TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0")


def requirements(libraries: Iterable[Library]) -> list[str]:
    """What is installed: JAX, the libraries, what their tests import, pytest, and this package's dependencies."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    ours = [line for line in config["options"]["install_requires"].split("\n") if line]
    pinned = {f"jax=={JAX}", f"jaxlib=={JAX}", *TOOLS, *ours}
    for library in libraries:
        pinned |= {f"{library.name}=={library.version}", *library.requirements}
    return sorted(pinned)


def install(folder: Path, libraries: Iterable[Library]) -> Path:
    """Makes the environment, unless it has what is required; returns its Python."""
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(requirements(libraries))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted.split("\n")], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def source(library: Library, checkouts: Path | None, folder: Path, python: Path) -> Path | None:
    """The folder with the library's tests, or None if there is none.

    Args:
        library: the library.
        checkouts: a folder with a checkout of each library, or None for their sdists.
        folder: where sdists are unpacked.
        python: a Python with pip.
    """
    found = checkouts / library.name if checkouts else unpacked_sdist(library, folder, python)
    return found if found and all((found / path).exists() for path in library.every) else None


def unpacked_sdist(library: Library, folder: Path, python: Path) -> Path | None:
    """Downloads and unpacks the library's sdist; None if pip offers none."""
    into = folder / f"{library.name}-{library.version}"
    if not into.exists():
        download = folder / "download"
        shutil.rmtree(download, ignore_errors=True)
        command = [
            python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary=:all:",
            "--dest",
            download,
        ]
        result = subprocess.run(
            [*command, f"{library.name}=={library.version}"], capture_output=True, text=True
        )
        archives = list(download.glob("*.tar.gz"))
        if result.returncode or not archives:
            return None
        with tarfile.open(archives[0]) as archive:
            archive.extractall(download, filter="data")
        (unpacked,) = (path for path in download.iterdir() if path.is_dir())
        unpacked.rename(into)
    return into
