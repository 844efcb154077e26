"""A process whose taps tests control from outside, and the `hcb` command that controls it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import command_server
from checkout import ROOT

PROGRAM = Path(__file__).with_name("controlled_program.py")


class Controlled:
    """A running `controlled_program.py`."""

    def __init__(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self.process = process
        self.environment = environment
        self.pid = process.pid

    def arrived(self) -> dict[str, Any]:
        """How many messages of each tap have arrived, and the sizes of their arrays."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = ast.literal_eval(self.process.stdout.readline())
        return found

    def hcb(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        """Runs the command in a separate process, without JAX."""
        return hcb(*arguments, environment=self.environment)

    def kill(self) -> None:
        """Ends it at once, with nothing tidied up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def hcb(*arguments: Any, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The `hcb` command, without JAX."""
    return command_server.run(
        [str(argument) for argument in arguments], ROOT, environment or {**os.environ}, 60
    )


@contextmanager
def controlled(folder: Path, *arguments: str, **variables: str) -> Iterator[Controlled]:
    """A process whose control socket is in `folder`; it ends with the block."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "HOSTCALLBACK_CONTROL_DIR": str(folder),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Controlled(process, environment)
        if process.poll() is None:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
