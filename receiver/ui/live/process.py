"""A process of this machine, by its control socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostcallback.receiver.control.client import ControlClient
from hostcallback.receiver.control.errors import ControlError, ControlSocketError
from hostcallback.receiver.ui.live.source import LiveProcess, is_process

ANSWER_SEC = 3.0
MAX_LOGS = 64


class ProcessSource:
    """One process. See `LiveSource`.

    Attributes:
        kind: "process".
        name: of the process, for the page.
    """

    kind = "process"

    def __init__(self, pid: int) -> None:
        """Asks process `pid` what it is.

        Raises:
            ControlSocketError: no such process exists, it does not use hostcallback, or it belongs to another user.
        """
        self._pid = pid
        self._client: ControlClient | None = None
        about = self._connected().ask("process")
        self.name = f"{pid}: {str(about['command'])[:200]}"
        self._logs = _logs(about)

    def logs(self) -> list[Path]:
        """Folders with the tap logs of the process."""
        return [log for log in self._logs if log.is_dir()]

    def ask(self) -> list[LiveProcess]:
        """Asks for its metrics; the process counts its taps from the first time on."""
        found = self._told("figures", failures=True)
        if not is_process(found):
            raise ControlError(f"process {self._pid} answered with something else than its metrics")
        self._logs = _logs(found["process"])
        return [LiveProcess(str(found["process"]["host"]), self._pid, "", found)]

    def set_rules(self, pattern: str, settings: Mapping[str, Any], run: str, *, reset: bool) -> list[str]:
        """Sets rules of its taps."""
        found = self._told("rules", pattern=pattern, settings=dict(settings), reset=reset)
        return [str(name) for name in found["names"]]

    def rest(self) -> None:
        """Closes the connection, at which the process stops counting."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        """Closes the connection."""
        self.rest()

    def _connected(self) -> ControlClient:
        if self._client is None:
            self._client = ControlClient(self._pid, ANSWER_SEC)
        return self._client

    def _told(self, command: str, **arguments: Any) -> Any:
        try:
            return self._connected().ask(command, **arguments)
        except ControlSocketError:
            self.rest()
            raise


def _logs(about: Mapping[str, Any]) -> list[Path]:
    found = about.get("logs")
    return [Path(log) for log in found[:MAX_LOGS] if isinstance(log, str)] if isinstance(found, list) else []
