"""The benchmark of a failure in one of two processes: how soon the other one raises it."""

from __future__ import annotations

import socket
import subprocess
import sys

from tools.bench.row import Row, figure
from tools.bench.separate_process import ROOT

PROGRAM = "tools.bench.programs.failing_job"
LIMIT_SEC = 5.0


def failing_job(rounds: int) -> Row:
    """From the message of a failed check in one process until the other, in a collective with it, has raised it."""
    taken = figure([_once() for _ in range(min(rounds, 5))])
    name = "a failed check in one of two processes, until the other raises it"
    return taken.within(LIMIT_SEC, name, "s")


def _once() -> float:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(number), port],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(2)
    ]
    first, second = (float(process.communicate(timeout=120)[0].split()[-1]) for process in started)
    return first - second
