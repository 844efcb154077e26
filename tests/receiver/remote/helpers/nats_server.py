"""A real nats-server with JetStream, which tests can kill and start again with its store."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from ports import free_port

WANTED = os.environ.get("HOSTCALLBACK_TEST_NATS") == "required"
"""Set where a missing server is a failure."""

WAIT_SEC = 60.0


def nats_server_program() -> str:
    """Path of the program; skips the test without it, or fails the test if the server is required."""
    found = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        text = "nats-server is not installed (on Debian: apt-get install nats-server)"
        if WANTED:
            pytest.fail(text)
        pytest.skip(text)
    return found


class NatsServerProcess:
    """The server, at one port.

    Attributes:
        url: its address.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self._command = [
            nats_server_program(), "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(folder / "jetstream"),
            *arguments,
        ]  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        ready, lines = threading.Event(), list[str]()

        def read() -> None:
            assert self.process.stderr is not None
            with self.process.stderr as stream:
                for line in stream:
                    lines.append(line)
                    if "Server is ready" in line:
                        ready.set()
            ready.set()

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()
        assert ready.wait(WAIT_SEC)
        assert self.process.poll() is None, lines

    def kill(self) -> None:
        """As if by a crash."""
        self.process.kill()
        self.process.wait(WAIT_SEC)
        self._thread.join(WAIT_SEC)

    def __enter__(self) -> NatsServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
