"""A group of failures: those of one kind on one source line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.messages.call_site import DescribedFrame
from hostcallback.receiver.terminal import printable
from hostcallback.receiver.ui.live.failures import LiveFailure

MAX_PLACES = 256
"""Processes and devices of a group that are counted apart."""

LOG_LATE_SEC = 1.0
"""Seconds by which a log may be behind its process."""

AROUND = 4
"""Lines of the source that are shown before and after the line."""

LINE_CHARS = 300


@dataclass(slots=True)
class Occurrence:
    """When something failed: Unix time in seconds and step, where they are known."""

    time: float | None
    step: int | None


@dataclass(slots=True)
class Group:
    """The failures of one kind on one line."""

    number: int
    kind: str
    title: str
    place: str
    values: str = ""
    traceback: str | None = None
    frame: tuple[str, int] | None = None
    count: int = 0
    per: Counter[tuple[str, str]] = field(default_factory=Counter)
    live: dict[tuple[str, int], LiveFailure] = field(default_factory=dict)
    first: Occurrence = field(default_factory=lambda: Occurrence(None, None))
    last: Occurrence = field(default_factory=lambda: Occurrence(None, None))

    def add(self, process: str, device: str, count: int, at: Occurrence) -> bool:
        """Counts failures that came at a time; returns whether they are the earliest so far."""
        self.count += count
        key = process, device
        if key in self.per or len(self.per) < MAX_PLACES:
            self.per[key] += count
        time = at.time or 0.0
        is_first = self.first.time is None or time < self.first.time
        if is_first:
            self.first = at
        if self.last.time is None or time >= self.last.time:
            self.last = at
        return is_first

    def take_live(self, process: tuple[str, int], found: LiveFailure) -> None:
        """Takes what a running process, a host and process id, tells of its failures here since it began."""
        if process in self.live or len(self.live) < MAX_PLACES:
            self.live[process] = found
        if not self.count:
            self.title, self.values, self.traceback = found.title, found.values, found.traceback or None

    def unlogged(self, names: Mapping[tuple[str, int], str]) -> Counter[tuple[str, str]]:
        """Counts the failures that running processes tell of beyond those in the logs, by process and device.

        `names` has the processes' names in the logs.
        """
        told: Counter[tuple[str, str]] = Counter()
        for process, found in self.live.items():
            name = names.get(process) or printable(f"{process[0]}:{process[1]}")
            told.update({(name, device): count for device, count in found.by_device.items()})
        return told - self.per

    def as_dict(self, names: Mapping[tuple[str, int], str]) -> dict[str, Any]:
        """Describes it for the page; reads the lines of the source."""
        unlogged = self.unlogged(names)
        first, last = self._times()
        return {
            "id": str(self.number),
            "kind": self.kind,
            "title": printable(self.title),
            "place": printable(self.place),
            "source": self._source(),
            "count": self.count + unlogged.total(),
            "per": [
                {"process": process, "device": printable(device), "count": count}
                for (process, device), count in (self.per + unlogged).most_common(MAX_PLACES)
            ],
            "first": {"time": first.time, "step": first.step},
            "last": {"time": last.time, "step": last.step},
            "values": printable(self.values),
            "traceback": self.traceback,
        }

    def _times(self) -> tuple[Occurrence, Occurrence]:
        # Of a failure that is also in a log, the log has the step, and comes a little later.
        first, last = self.first, self.last
        for found in self.live.values():
            if first.time is None or found.first < first.time:
                first = Occurrence(found.first, None)
            if last.time is None or found.last > last.time + LOG_LATE_SEC:
                last = Occurrence(found.last, None)
        return first, last

    @property
    def last_time(self) -> float:
        """Unix time in seconds of the last failure; 0 if it is not known."""
        return self._times()[1].time or 0.0

    def _source(self) -> list[list[Any]] | None:
        if self.frame is None:
            return None
        file, line = self.frame
        described = DescribedFrame(file, line, "")
        if line < 1 or not described.source_text(line):
            return None
        lines = range(max(1, line - AROUND), line + AROUND + 1)
        found = [(number, described.source_text(number)) for number in lines]
        return [[number, _code(text)] for number, text in found if text]


def frame_of(place: str) -> tuple[str, int] | None:
    """The file and the line of a place such as `train.py:31 (step)`; None if it names none."""
    found = re.match(r"(.+):(\d{1,9})(?: |$)", place)
    return None if found is None else (found[1], int(found[2]))


def _code(text: str) -> str:
    # Tabs and spaces of the beginning stay.
    return printable(text.rstrip("\r\n").replace("\t", "    "))[:LINE_CHARS]
