"""Runs Python in other processes, and limits the files of this one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def _environment(variables: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **variables}.items() if value is not None}


def run_python(
    *arguments: str | Path, cwd: Path | None = None, timeout_sec: float = 100, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the arguments and keeps its output.

    The environment is this process's and the variables; those that are None are left out.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=_environment(variables),
        capture_output=True,
        text=True,
        timeout=timeout_sec,
        check=False,
    )


def python_output(*arguments: str | Path, **options: Any) -> str:
    """What Python prints, with the arguments and options of `run_python`; it must succeed."""
    done = run_python(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    stdin: Any = None,
    stdout: Any = subprocess.PIPE,
    stderr: Any = None,
    **variables: str | None,
) -> subprocess.Popen[str]:
    """Starts Python, in the environment of `run_python`; its output is a pipe unless given."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=_environment(variables),
    )


def run_pythons(
    commands: Sequence[Sequence[str | Path]], timeout_sec: float, **variables: str | None
) -> list[str]:
    """Runs Python with each list of arguments, all at the same time. All must succeed; what each printed."""
    processes = [start_python(*command, stderr=subprocess.STDOUT, **variables) for command in commands]
    outputs = [process.communicate(timeout=timeout_sec)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(commands), outputs
    return outputs


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """Lets no file of this process become longer, as on a full disk: writes fail with "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


TAPPED = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
from jax import lax
import hostcallback as hcb

def emit(x):
    sys.stdout.write(f"got {int(x)}\\n"); sys.stdout.flush()

@hcb.jit
def f(x):
    y = lax.fori_loop(0, 50, lambda i, c: c @ c * 1e-3, jnp.ones((64, 64)) * 1e-2)[0, 0]
    return hcb.id_tap(emit, x + (0 * y).astype(int))
"""


def run_tapped(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `TAPPED`, whose `f` taps its argument and prints what arrives, and these lines after it."""
    return run_python("-c", TAPPED + textwrap.dedent(body), timeout_sec=90, **variables)


def got(result: subprocess.CompletedProcess[str]) -> list[int]:
    """What arrived, in order."""
    return [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("got")]
