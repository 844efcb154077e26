"""All running processes that the page shows: asked at most twice a second, and only while a page is open."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.terminal import printable
from hostcallback.receiver.ui.live.source import LiveProcess, LiveSource

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
        """Asks the processes if that is half a second ago."""
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
        """Changes with the number of processes, and of sources that cannot be reached."""
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
                    "state": "lost" if number in self._problems else "live",
                    "message": self._problems.get(number, ""),
                }
                for number, source in enumerate(self._sources)
            ]

    def set_rules(self, pattern: str, settings: Mapping[str, Any], run: str, *, reset: bool) -> list[str]:
        """Sets rules in all sources; returns the names of the taps.

        Raises:
            HostCallbackError: no source could set them; the text is that of the first.
        """
        names: dict[str, None] = {}
        problems: list[HostCallbackError] = []
        with self._lock:
            for source in self._sources:
                try:
                    names |= dict.fromkeys(source.set_rules(pattern, settings, run, reset=reset))
                except HostCallbackError as error:
                    problems.append(error)
            self._asked_at = float("-inf")
        if problems and not names:
            raise problems[0]
        return list(names)

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
