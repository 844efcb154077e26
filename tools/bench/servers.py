"""The servers of the forwarding benchmarks, each in a separate process."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Disks differ too much to be measured along."""


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, which the context manager removes at its end."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@contextlib.contextmanager
def collector(folder: Path, *arguments: str) -> Iterator[str]:
    """`hcb collect`: its address. It stores in `collected` in the folder."""
    given = (
        "collect",
        "--quiet",
        "--log",
        str(folder / "collected"),
        *(arguments or ("--listen", "localhost:0")),
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "hostcallback.receiver.cli", *given],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split("collecting ")[1].split()[1]
        finally:
            process.terminate()


def forget_stored(folder: Path) -> None:
    """Removes the data that a collector has stored, which would fill the memory."""
    for path in (folder / "collected").glob("*/*.hcblog"):
        path.unlink()


@contextlib.contextmanager
def bare_server(*arguments: str) -> Iterator[str]:
    """`programs/peer_grpc_server.py`: its address."""
    program = "tools.bench.programs.peer_grpc_server"
    with subprocess.Popen(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"localhost:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def nats_server_program() -> str | None:
    """Path of the executable, if it is installed."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nats_server(program: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A NATS server with JetStream: its address and process id."""
    command = [program, "-js", "-a", "127.0.0.1", "-p", "-1", "-sd", str(folder / "jetstream")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if "Listening for client connections on" in line:
                url = "nats://" + line.split()[-1]
            if "Server is ready" in line:
                break
        try:
            yield url, process.pid
        finally:
            process.terminate()
