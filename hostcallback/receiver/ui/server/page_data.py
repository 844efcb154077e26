"""What the page shows, as data for JSON, from logs and running processes, and the thread that fills the index."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.failures.told_failure import told_failures
from hostcallback.receiver.log import logger
from hostcallback.receiver.taplog.diff.comparison import Tolerance
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index.devices import Device
from hostcallback.receiver.ui.index.difference import difference
from hostcallback.receiver.ui.index.log_files import Segment
from hostcallback.receiver.ui.index.log_index import LogIndex, run_of
from hostcallback.receiver.ui.index.runs import names, runs
from hostcallback.receiver.ui.index.taps import Tap
from hostcallback.receiver.ui.live.processes import LiveProcesses
from hostcallback.receiver.ui.live.source import LiveProcess
from hostcallback.receiver.ui.server import requests

INTERVAL_SEC = 0.5
"""Seconds between looks at the logs while a page is open."""

FIRST_SEC = 0.25
"""Seconds after which the reading of a log is far enough for a first chart."""


LOOK_SEC = 1.0
"""Seconds for which logs with many files are looked at before what was found is read."""


class Filler:
    """Fills an index. Without open pages and requests it only reads chunks that it has found already.

    Attributes:
        index: the index.
    """

    def __init__(self, index: LogIndex) -> None:
        """Starts the thread."""
        self.index = index
        self._changed = threading.Condition()
        self._watchers = 0
        self._wanted = True
        self._closed = False
        self._looked = 0
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="hostcallback-ui", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, the logs are polled every half second."""
        with self._changed:
            self._watchers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def refresh(self) -> None:
        """Looks at the logs again if the last look is long ago, and waits for it a moment."""
        with self._changed:
            if time.monotonic() - self._looked_at < INTERVAL_SEC:
                return
            before = self._looked
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looked != before or self._closed, FIRST_SEC + INTERVAL_SEC)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._wanted and not self.index.pending and not self.index.is_looking:
                    self._changed.wait(INTERVAL_SEC if self._watchers else None)
                    if not self._wanted and not self._watchers:
                        continue
                looks = not self._closed and (
                    self._wanted
                    or self.index.is_looking
                    or time.monotonic() - self._looked_at >= INTERVAL_SEC
                )
                self._wanted = False
            self._work(looks)

    def _work(self, looks: bool) -> None:
        try:
            if looks:
                self.index.look(LOOK_SEC)
            self.index.read_some(FIRST_SEC)
        except Exception:  # a bug, or a hostile log: the page stays up with what was read
            logger.exception("the page's index could not take a part of the log")
        with self._changed:
            if looks:
                self._looked += 1
                self._looked_at = time.monotonic()
            self._changed.notify_all()


TAPS = 50
"""Taps of a process that a device lists."""


def take_taps(index: LogIndex, live: LiveProcesses) -> dict[tuple[str, str], bool]:
    """Notes taps and checks of running processes in the index; returns whether each is on, by name and line.

    Called under the index's lock.
    """
    enabled: dict[tuple[str, str], bool] = {}
    processes = live.processes()
    logged = {(tap.name, tap.place) for tap in index.taps.rows if tap.is_logged} if processes else set()
    for process in processes:
        for tap in process.figures["taps"]:
            key = tap["name"], tap["source_line"]
            enabled[key] = enabled.get(key, True) and bool(tap.get("enabled", True))
            if key not in logged:
                kind = "check" if tap.get("check") else "array"
                row = index.taps.of(process.run or _run(process), tap["name"], "", kind, tap["source_line"])
                if row is not None:
                    row.count = max(row.count, int(tap["messages"]))
    return enabled


def take_failures(index: LogIndex, live: LiveProcesses) -> None:
    """Adds the failures that running processes report to the index. Called under the index's lock."""
    for process in live.processes():
        for failure in told_failures(process.figures.get("failures")):
            index.failures.take_live((process.host, process.pid), failure)


def devices(index: LogIndex, live: LiveProcesses) -> list[dict[str, Any]]:
    """Describes all devices. Called under the index's lock."""
    growing = {(segment.writer.host, segment.writer.pid) for segment in index.live_segments()}
    known = index.devices.all()
    shown = [device.as_dict(live=(device.host, device.pid) in growing) for device in known]
    last = {(device.host, device.pid, device.device): number for number, device in enumerate(known)}
    for process in live.processes():
        for row in process.figures["devices"]:
            number = last.get((process.host, process.pid, row["device"]))
            if number is None:
                run, name = process.run or _run(process), f"{process.host}:{process.pid}"
                number = len(shown)
                shown.append(Device(run, name, row["device"]).as_dict())
            device = shown[number]
            shown[number] = device | {
                "live": True,
                "rate": live.rate(process, row["device"]),
                "messages": max(device["messages"], int(row["emitted"])),
                "queue_bytes": row["queued_bytes"],
                "backlog": row["queued"],
                "drops": max(device["drops"], int(row["dropped"])),
                "stalls": row["waiting"],
                "seconds_in_taps": sum(tap["tap_sec"] for tap in process.figures["taps"]),
                "taps": _taps(process) or device["taps"],
            }
    return shown


def _taps(process: LiveProcess) -> list[dict[str, Any]]:
    rows = sorted(process.figures["taps"], key=lambda tap: -tap["messages"])[:TAPS]
    return [
        {"name": printable(tap["name"]), "messages": tap["messages"], "seconds": tap["tap_sec"]}
        for tap in rows
    ]


def _run(process: LiveProcess) -> str:
    return f"{process.host}:{process.pid}"


MAX_KNOBS = 200

OVERVIEW_SEC = 3.0
"""Seconds between the events that tell of a new overview, while only counts change."""

MAX_CHARTS = 64
"""Taps in one request for charts."""


class PageData:
    """Answers about logs. Any thread.

    Attributes:
        control: whether the page may set rules.
        filler: fills the index.
        index: of the logs.
        live: running processes.
        is_ending: whether the server ends: streams of events end with it.
    """

    def __init__(
        self,
        index: LogIndex,
        names: Sequence[str],
        *,
        live: LiveProcesses | None = None,
        control: bool = False,
    ) -> None:
        """Starts to read `index`; `names` are those of its logs for the page, `live` are running processes."""
        self.control = control
        self.live = live or LiveProcesses()
        self.index = index
        self.filler = Filler(index)
        self.is_ending: Callable[[], bool] = lambda: False
        self._names = names
        self._lock = threading.Lock()  # one comparison at a time
        self._told: tuple[int, ...] = ()
        self._taken = 0
        self._told_at = float("-inf")

    def close(self) -> None:
        """Stops reading, and closes the connections to processes."""
        self.filler.close()
        self.live.close()

    def _refresh(self) -> None:
        self.filler.refresh()
        self.live.refresh()
        for log in self.live.logs():
            with self.index.lock:
                self.index.files.add(log)

    def overview(self, pattern: str, limit: int) -> dict[str, Any]:
        """The sources, the runs, and the taps whose name contains or fits `pattern`."""
        self._refresh()
        index = self.index
        with index.lock:
            growing = index.live_segments()
            live = set(map(run_of, growing))
            enabled = take_taps(index, self.live)
            self._take_failures()
            rows = [tap for tap in index.taps.rows if _fits(tap, pattern)] if pattern else index.taps.rows
            taps = [tap.as_dict() | {"enabled": enabled.get((tap.name, tap.place))} for tap in rows[:limit]]
            left_out = index.taps.left_out.count
            runs = self._runs(live)
            failures = index.failures
            errors, kinds, losses = failures.count, failures.kinds, failures.losses
            sources = [self._log_source(name, growing) for name in self._names]
            sources += self.live.sources()
        return {
            "version": _version(),
            "control": self.control,
            "sources": sources,
            "runs": runs,
            "taps": taps,
            "taps_total": len(rows) + (0 if pattern else left_out),
            "taps_left_out": left_out,
            "errors": errors,
            "error_kinds": kinds,
            "losses": losses,
        }

    def fresh(self) -> LogIndex:
        """The index, after a look at the logs."""
        self.filler.refresh()
        return self.index

    def taps(self, numbers: Sequence[int]) -> list[Tap]:
        """The taps with these ids, after a look at the logs.

        Raises:
            UnknownError: there is none with one of them.
        """
        rows = self.fresh().taps.rows
        for number in numbers:
            if not 0 <= number < len(rows):
                raise requests.UnknownError(f"no tap has the id {number}: /api/overview lists the taps")
        return [rows[number] for number in numbers]

    def errors(self) -> dict[str, Any]:
        """The groups of failures."""
        self._refresh()
        with self.index.lock:
            self._take_failures()
            return {"groups": self.index.failures.as_dicts()}

    def difference(self, left: str, right: str, tolerance: Tolerance) -> dict[str, Any]:
        """The difference of two runs; one comparison at a time."""
        self._refresh()
        with self.index.lock:
            runs = {run_of(segment) for segment in self.index.files.segments}
        for run in (left, right):
            if run not in runs:
                raise requests.UnknownError(f"no run is called {run[:100]!r}: /api/overview lists the runs")
        with self._lock:
            return difference(self.index, left, right, tolerance)

    def devices(self) -> dict[str, Any]:
        """The devices."""
        self._refresh()
        with self.index.lock:
            return {"devices": devices(self.index, self.live)}

    def set_rules(self, wanted: requests.RuleRequest) -> dict[str, Any]:
        """Sets rules of taps in the running processes.

        Raises:
            NoControlError: this server was started without --control.
            HostCallbackError: no process could set them.
        """
        told = self._controlled().tell(
            "rules", wanted.run, pattern=wanted.pattern, settings=wanted.settings, reset=wanted.reset
        )
        found = [name for one in told if isinstance(one, dict) for name in one.get("names", ())]
        return {"applied": [printable(str(name)) for name in dict.fromkeys(found)]}

    def knobs(self) -> dict[str, Any]:
        """The knobs of the running processes, by name, with the value in each process that has it."""
        told: list[Any] = []
        with contextlib.suppress(HostCallbackError):  # it runs an earlier version, or has ended
            told = self.live.tell("knobs") if self.live else []
        found: dict[str, dict[str, Any]] = {}
        for knob in (knob for known in told if isinstance(known, list) for knob in known):
            if isinstance(knob, dict) and len(found) < MAX_KNOBS:
                shown = {
                    key: _short(knob.get(key)) for key in ("default", "min", "max", "dtype", "source_line")
                }
                row = found.setdefault(printable(str(knob.get("name"))), {**shown, "values": []})
                row["values"].append(_short(knob.get("value")))
        return {
            "processes": len(told),
            "knobs": [{"name": name, **row} for name, row in sorted(found.items())],
        }

    def set_knob(self, wanted: Any) -> dict[str, Any]:
        """Sets a knob in the running processes that have it. Raises as `set_rules` does."""
        if not isinstance(wanted, dict) or not isinstance(wanted.get("name"), str) or "value" not in wanted:
            raise requests.BadRequestError(
                f"the body is {str(wanted)[:100]}, expected the name and the value of a knob"
            )
        told = self._controlled().tell("set", name=wanted["name"], value=wanted["value"], by="hcb ui")
        return {"processes": len(told)}

    def stop(self) -> dict[str, Any]:
        """Requests a stop of the running processes. Raises as `set_rules` does."""
        return {"processes": len(self._controlled().tell("stop", by="hcb ui"))}

    def _controlled(self) -> LiveProcesses:
        if not self.control:
            raise requests.NoControlError(
                "the page may only look: start hcb ui with --control to control from it"
            )
        if not self.live:
            raise requests.NoControlError(
                "no running process is shown: give its PID, or a collector with --from"
            )
        return self.live

    def changes(self, watched: Sequence[int]) -> dict[str, Any]:
        """The changes that an open page gets twice a second; `watched` are its taps."""
        self.live.refresh()
        index = self.index
        rows = index.taps.rows
        with index.lock:
            live = set(map(run_of, index.live_segments()))
            self._take_failures()
            return {
                "overview": [
                    len(rows),
                    len(index.files.segments),
                    sorted(live),
                    bool(index.pending or index.is_looking),
                    self._seldom(),
                ],
                "taps": [
                    [number, rows[number].count, rows[number].last_finite]
                    for number in watched
                    if number < len(rows)
                ],
                "texts": index.texts,
                "errors": [index.failures.kinds, index.failures.count],
                "devices": [index.version, self.live.version],
                "source": "live" if live else "ended",
            }

    def _take_failures(self) -> None:
        # Under the index's lock. Once for each answer of the processes.
        if self.live.version != self._taken:
            self._taken = self.live.version
            take_failures(self.index, self.live)

    def _seldom(self) -> tuple[int, ...]:
        # The counts of the overview, which change with each message, are told every few seconds.
        if time.monotonic() - self._told_at >= OVERVIEW_SEC:
            self._told_at = time.monotonic()
            self._told = self.index.version, len(self.index.files.problems), self.live.state
        return self._told

    def _runs(self, live: set[str]) -> list[dict[str, Any]]:
        found = runs(self.index)
        called = names(found)
        devices = self.index.devices.last_by_run()
        return [
            {
                "id": run,
                "name": called[run],
                "started": min(segment.created_ns for segment in segments) / 1e9 or None,
                "last": devices.get(run),
                "live": run in live,
                "messages": self.index.messages.get(run, 0),
            }
            for run, segments in found.items()
        ]

    def _log_source(self, name: str, growing: Sequence[Segment]) -> dict[str, Any]:
        index = self.index
        said = []
        is_live = any(Path(name) in (segment.path, *segment.path.parents) for segment in growing)
        if index.is_looking:
            said.append("reading: not all files have been looked at")
        elif index.pending:
            said.append(f"reading: {index.pending} of {len(index.chunks)} parts are left")
        elif not index.files.segments:
            said.append("no messages so far")
        if index.files.problems:
            more = len(index.files.problems) - 1
            said.append(index.files.problems[0] + (f" (and {more} more)" if more else ""))
        if index.taps.left_out.count:
            kept = f"the page keeps the first {len(index.taps.rows):,}"
            said.append(f"about {index.taps.left_out.count:,} taps are left out: {kept}")
        return {
            "kind": "log",
            "name": printable(name),
            "state": "live" if is_live else "ended",
            "message": printable("; ".join(said)),
        }


def _short(value: Any) -> Any:
    # A number, or else a text.
    if isinstance(value, bool | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return printable(json.dumps(value) if isinstance(value, list) else str(value))[:1000]


def _fits(tap: Tap, pattern: str) -> bool:
    name = f"{tap.name}/{tap.leaf}" if tap.leaf else tap.name
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern) or fnmatchcase(tap.name, pattern)
    return pattern.lower() in name.lower()


def _version() -> str:
    try:
        return version("hostcallback")
    except PackageNotFoundError:
        return ""
