"""Runs the `hcb` command in a separate process that cannot import JAX, and makes logs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import command_server
from checkout import python_path


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Environment of a process without JAX; `folder` holds the package that refuses the import."""
    path = python_path(command_server.refuse_jax(folder / "no_jax"))
    return {**os.environ, "PYTHONPATH": path, "TZ": "UTC", **variables}


def hcb(folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in `folder`. It never prints a traceback."""
    env = environment(folder, **variables)
    command = [sys.executable, "-m", "hostcallback.receiver.cli", *map(str, arguments)]
    if variables:  # Python itself reads some of them when it starts
        result = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    else:
        result = command_server.run([str(argument) for argument in arguments], folder, env, 60)
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
