"""This process as one that commands control."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.control import client
from hostcallback.receiver.control.commands import commands
from hostcallback.receiver.control.server import ControlServer
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.runtime.runtime import Runtime

PID = str(os.getpid())

TAPS = ("loss", "layer1/grad", "sign")
"""Names of its taps, in lines 1 to 3; the last is a check."""


class Served:
    """Answers commands, with three taps and no receiver.

    Attributes:
        handlers: the answers; a test may put its own in their place.
        path: of the socket.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Listens from now on."""
        self._capsys = capsys
        self._runtime = Runtime()
        self.handlers = commands(self._runtime)
        self._server = ControlServer(self.handlers)
        self.path = self._server.path
        taps = [
            Consumer(line, name, f"train.py:{line} (f)", print, is_check=name == "sign", is_switchable=True)
            for line, name in enumerate(TAPS, 1)
        ]
        self._leases = [self._runtime.registry.lease(tap) for tap in taps]

    def hcb(self, *arguments: str) -> tuple[int, str, str]:
        """The exit status of a command, and what it writes to the standard output and error."""
        try:
            status = main(arguments)
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return status, *self._capsys.readouterr()

    def stop(self) -> None:
        """Listens no more."""
        self._server.stop()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Served]:
    """This process answers, and commands see no other one."""
    # Not below `tmp_path`: the names of sockets are limited to 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", short)
        found = Served(capsys)
        sockets = found.path.parent
        monkeypatch.setattr(
            client, "sockets", lambda: {int(path.stem): path for path in sockets.glob("*.sock")}
        )
        yield found
        found.stop()
