"""Runs the `hcb` command in a separate process that cannot import JAX, and makes logs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkout import python_path

# The tests detect an import of JAX: a package of that name that cannot be imported is first on the path.
REFUSE = "raise ImportError('hcb must work without JAX')\n"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Environment of a process without JAX; `folder` holds the package that refuses the import."""
    refused = folder / "no_jax"
    for name in ("jax", "jaxlib"):
        (refused / name).mkdir(parents=True, exist_ok=True)
        (refused / name / "__init__.py").write_text(REFUSE)
    return {**os.environ, "PYTHONPATH": python_path(refused), "TZ": "UTC", **variables}


def hcb(folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in `folder`. It never prints a traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "hostcallback.receiver.cli", *map(str, arguments)],
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts the command; its output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "hostcallback.receiver.cli", *map(str, arguments)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
