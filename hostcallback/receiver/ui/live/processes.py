"""The running processes that the page shows, by their control sockets, and what they tell of their failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hostcallback.receiver.control.client import ControlClient
from hostcallback.receiver.control.protocol import ControlError, ControlSocketError
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.processes import is_alive
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.live.source import CollectorSource, LiveProcess, is_process

ANSWER_SEC = 3.0
MAX_LOGS = 64


class ProcessSource:
    """One process of this machine. One thread at a time.

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

    def tell(self, command: str, run: str, **arguments: Any) -> list[Any]:
        """Sends a command; returns its result, as the only one."""
        return [self._told(command, **arguments)]

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return not is_alive(self._pid)

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


LiveSource = ProcessSource | CollectorSource

INTERVAL_SEC = 0.5
REST_SEC = 10.0
"""Seconds without requests after which the processes may stop counting."""


class LiveProcesses:
    """The processes of some sources. Any thread."""

    def __init__(self, sources: Sequence[LiveSource] = ()) -> None:
        """Asks nothing yet; `close` closes the sources."""
        self._sources = list(sources)
        self._lock = threading.Lock()
        self._found: dict[int, list[LiveProcess]] = {}
        self._problems: dict[int, str] = {}
        self._before: dict[tuple[str, int], LiveProcess] = {}
        self._asked_at = float("-inf")
        self._wanted_at = 0.0
        self._timer: threading.Timer | None = None
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._sources)

    def close(self) -> None:
        """Closes the sources."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            for source in self._sources:
                source.close()
            self._sources.clear()

    def refresh(self) -> None:
        """Asks the processes, at most twice a second."""
        if not self._sources:
            return
        with self._lock:
            self._wanted_at = time.monotonic()
            if self._wanted_at - self._asked_at < INTERVAL_SEC:
                return
            before = {(each.host, each.pid): each for each in self._processes()}
            for number, source in enumerate(self._sources):
                try:
                    self._found[number] = source.ask()
                    self._problems.pop(number, None)
                except HostCallbackError as error:
                    self._found[number] = []
                    self._problems[number] = printable(str(error))
            self._before = before
            self._asked_at = time.monotonic()
            self.version += 1
            if self._timer is None and self._sources:
                self._start_timer()

    @property
    def state(self) -> int:
        """A value that changes with the number of processes and of unreachable sources."""
        return len(self._problems) * 100_000 + len(self._processes())

    def processes(self) -> list[LiveProcess]:
        """The processes that answered last."""
        with self._lock:
            return self._processes()

    def logs(self) -> list[Path]:
        """Folders with logs of the processes, as far as they are known."""
        with self._lock:
            return [log for source in self._sources for log in source.logs()]

    def rate(self, process: LiveProcess, device: str) -> float:
        """Messages per second of a device since the answer before the last one."""
        earlier = self._before.get((process.host, process.pid))
        now = _emitted(process, device)
        if earlier is None or now is None:
            return 0.0
        then = _emitted(earlier, device)
        seconds = process.figures["time"] - earlier.figures["time"]
        return max(0.0, (now - (then or 0)) / seconds) if seconds > 0 else 0.0

    def sources(self) -> list[dict[str, Any]]:
        """Describes the sources for the page."""
        with self._lock:
            return [
                {
                    "kind": source.kind,
                    "name": printable(source.name),
                    "state": self._state(number, source),
                    "message": self._problems.get(number, ""),
                }
                for number, source in enumerate(self._sources)
            ]

    def _state(self, number: int, source: LiveSource) -> str:
        if number not in self._problems:
            return "live"
        return "ended" if source.has_ended() else "lost"

    def tell(self, command: str, run: str = "", **arguments: Any) -> list[Any]:
        """Sends a command to the processes of a run, by default of all; returns the results of those that have one.

        Raises:
            HostCallbackError: there is none; the text is that of the first process or source.
        """
        results: list[Any] = []
        problems: list[HostCallbackError] = []
        with self._lock:
            for source in self._sources:
                try:
                    results += source.tell(command, run, **arguments)
                except HostCallbackError as error:
                    problems.append(error)
            self._asked_at = float("-inf")
        if problems and not results:
            raise problems[0]
        return results

    def _processes(self) -> list[LiveProcess]:
        return [each for found in self._found.values() for each in found]

    def _start_timer(self) -> None:
        self._timer = threading.Timer(REST_SEC, self._look_whether_to_rest)
        self._timer.daemon = True
        self._timer.start()

    def _look_whether_to_rest(self) -> None:
        with self._lock:
            self._timer = None
            if time.monotonic() - self._wanted_at < REST_SEC:
                self._start_timer()
                return
            for source in self._sources:
                source.rest()


def _emitted(process: LiveProcess, device: str) -> float | None:
    return next((row["emitted"] for row in process.figures["devices"] if row["device"] == device), None)
