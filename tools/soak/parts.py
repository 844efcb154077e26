"""The processes of the test as their parent sees them: the collector, the steady process, and those that are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tools.bench.machine import resident_mib
from tools.soak.life import Order

ROOT = Path(__file__).resolve().parents[2]
START_SEC = 120.0


def environment(**variables: str) -> dict[str, str]:
    """The environment of all processes of the test."""
    flags = "--xla_force_host_platform_device_count=1"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **variables}


class Collector:
    """`hcb collect`, at one address.

    Attributes:
        log: its folder.
        most_kib: the most memory that it was seen to use.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        """Starts it at a free port, with more arguments."""
        with socket.create_server(("localhost", 0)) as free:
            self._port = free.getsockname()[1]
        self.log = folder / "collected"
        self.most_kib = 0
        self._more = more
        self._errors = folder / "collector"
        self.start()

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"localhost:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self) -> None:
        """Starts it, also after `kill`."""
        command = [sys.executable, "-m", "hostcallback.receiver.cli", "collect", "--quiet"]
        command += ["--listen", self.address, "--log", str(self.log), *self._more]
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, env=environment()
            )

    def look(self) -> None:
        """Notes its memory."""
        self.most_kib = max(self.most_kib, int(1024 * resident_mib(self.pid)))

    def kill(self) -> None:
        """As if by a crash."""
        self.look()
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """As its user does; returns its status."""
        self.look()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(START_SEC)

    def faults(self) -> list[str]:
        """What it said that it must not say."""
        bad = ("Traceback", "set aside", "damaged and", "ERROR")
        lines = self._errors.read_text(errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in bad)]


class Lives:
    """Starts and ends processes of `tools.soak.life`."""

    def __init__(self) -> None:
        """Starts the process that forks them, which imports JAX."""
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tools.soak.life"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT, env=environment(HOSTCALLBACK_RING_BYTES=str(1 << 20)),
        )  # fmt: skip
        self._answer()

    def start(self, order: Order) -> int:
        """Starts one; returns its process id."""
        Path(order.folder).mkdir(parents=True)
        return int(self._ask(order._asdict())["pid"])

    def wait(self, pid: int) -> int:
        """Waits for its end; returns its status."""
        return int(self._ask({"wait": pid})["status"])

    def close(self) -> None:
        """Ends the process that forks."""
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(START_SEC)

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(line) + "\n")
        self._parent.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def wait_for_file(path: Path, pid: int) -> bool:
    """Waits until a process has made a file; False if it has ended or takes too long."""
    pause, deadline = threading.Event(), time.monotonic() + START_SEC
    while not path.exists():
        status = Path(f"/proc/{pid}/stat")
        if time.monotonic() > deadline or not status.exists() or ") Z " in status.read_text():
            return False
        pause.wait(0.01)
    return True
