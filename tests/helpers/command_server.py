"""Runs `hcb` commands in forks of one process that has imported them: most of a command's time is imports."""

from __future__ import annotations

import atexit
import functools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from checkout import python_path

# The tests detect an import of JAX: a package of that name that cannot be imported is first on the path.
REFUSE = "raise ImportError('hcb must work without JAX')\n"


def refuse_jax(folder: Path) -> Path:
    """Makes, and returns, a folder in which JAX cannot be imported, for the front of a path."""
    for name in ("jax", "jaxlib"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(REFUSE)
    return folder


@functools.cache
def _started() -> subprocess.Popen[str]:
    folder = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(refuse_jax(Path(folder.name)))},
    )

    def end() -> None:
        with server:
            server.communicate(timeout=20)  # it ends when its input does
        folder.cleanup()

    atexit.register(end)
    return server


def run(
    arguments: list[str], folder: Path, environment: dict[str, str], timeout_sec: float
) -> subprocess.CompletedProcess[str]:
    """Runs one command, in a process that cannot import JAX."""
    server = _started()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as outputs:
        out, error = Path(outputs, "out"), Path(outputs, "err")
        order = {
            "arguments": arguments, "folder": str(folder), "environment": environment, "out": str(out),
            "error": str(error), "timeout_sec": timeout_sec,
        }  # fmt: skip
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        if status is None:
            raise subprocess.TimeoutExpired(arguments, timeout_sec, out.read_text(), error.read_text())
        return subprocess.CompletedProcess(arguments, status, out.read_text(), error.read_text())


def _child(order: dict[str, Any]) -> None:
    # Becomes as if started with the order's arguments, environment, folder and files.
    from hostcallback.receiver.cli import script

    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    sys.argv = ["hcb", *order["arguments"]]
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    script()


def _serve() -> None:
    from hostcallback.receiver.cli import commands

    for module in pkgutil.iter_modules(commands.__path__):
        import_module(f"{commands.__name__}.{module.name}")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _end_with(order)
        answers.write(json.dumps(_status(pid, order["timeout_sec"])) + "\n")
        answers.flush()


def _end_with(order: dict[str, Any]) -> None:
    status = 1
    try:
        _child(order)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(pid: int, timeout_sec: float) -> int | None:
    # As `subprocess` has it, negative for a signal; None after the time.
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(int(timeout_sec))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    was_late = signal.alarm(0) == 0
    return None if was_late else status


if __name__ == "__main__":
    _serve()
