"""Counts of messages by run, process and device."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render import process_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array

MAX_DEVICES = 4096
MAX_TAPS = 200
"""Taps of a device that are counted by name."""

FEW = 256
"""Fewer messages are counted without numpy."""

RECENT_NS = 10 * 10**9
"""The rate of a device that runs is that of its last ten seconds."""


@dataclass(slots=True)
class Device:
    """Counts and rate of one device of one process."""

    run: str
    process: str
    device: str
    host: str = ""
    pid: int = 0
    messages: int = 0
    first_ns: int = 2**63 - 1
    last_ns: int = 0
    drops: int = 0
    taps: Counter[str] = field(default_factory=Counter)
    recent: list[tuple[int, int, int]] = field(default_factory=list)
    kept_ns: int = 0

    def took(self, low: int, high: int, count: int) -> None:
        """Counts messages between two times; they come in any order."""
        self.messages += count
        self.first_ns, self.last_ns = min(self.first_ns, low), max(self.last_ns, high)
        self.recent.append((low, high, count))
        if self.last_ns - self.kept_ns > RECENT_NS:
            self.kept_ns = self.last_ns
            self.recent = self.last_parts()

    def last_parts(self) -> list[tuple[int, int, int]]:
        """Times and counts of the messages of the last ten seconds that the device has sent."""
        return [part for part in self.recent if part[1] >= self.last_ns - RECENT_NS]

    def rate(self, *, live: bool) -> float:
        """Messages per second: of the last ten seconds of its messages, or, when it has ended, of all."""
        parts = self.last_parts() if live else [(self.first_ns, self.last_ns, self.messages)]
        span = (self.last_ns - min((low for low, _, _ in parts), default=self.last_ns)) * 1e-9
        return sum(count for _, _, count in parts) / span if span > 0 else 0.0

    def as_dict(self, *, live: bool = True) -> dict[str, Any]:
        """Describes it for the page; `live`: whether its process may still send."""
        last = self.last_ns / 1e9 if self.messages else None
        return {
            "run": self.run,
            "process": self.process,
            "device": printable(self.device),
            "rate": self.rate(live=live),
            "live": live,
            "messages": self.messages,
            "queue_bytes": None,
            "backlog": None,
            "drops": self.drops,
            "stalls": 0,
            "seconds_in_taps": None,
            "last_message": last,
            "silent_sec": None if last is None else max(0.0, time.time() - last),
            "taps": [
                {"name": printable(name), "messages": count, "seconds": None}
                for name, count in self.taps.most_common(50)
            ],
        }


def _counts(ids: Array) -> Iterable[tuple[int, int]]:
    if len(ids) <= FEW:
        return Counter(ids.tolist()).items()
    found, counts = np.unique(ids, return_counts=True)
    return zip(found.tolist(), counts.tolist(), strict=True)


class DeviceTable:
    """All devices that sent messages."""

    def __init__(self) -> None:
        """There are none yet."""
        self._devices: dict[tuple[str, str, str, str], Device] = {}
        self._logs: dict[tuple[str, str, str], list[tuple[str, Device]]] = {}

    def add(self, run_name: str, run: Stretch) -> None:
        """Counts the messages of a block."""
        device = self._of(run_name, run.writer, run.device, run.path)
        if device is None:
            return
        block = run.block
        if len(block) <= FEW:
            low, high = min(block.times), max(block.times)
        else:
            low, high = int(block.times_ns.min()), int(block.times_ns.max())
        device.took(low, high, len(block))
        for consumer_id, count in _counts(block.consumer_ids):
            described = run.described.get(consumer_id)
            if described is not None and (described.name in device.taps or len(device.taps) < MAX_TAPS):
                device.taps[described.name] += count

    def lost(self, run_name: str, writer: Writer, lost: Lost, path: Path) -> None:
        """Counts messages that were lost, as a segment says."""
        device = self._of(run_name, writer, lost.device, path)
        if device is not None:
            device.drops += max(0, lost.messages)

    def all(self) -> list[Device]:
        """The devices."""
        return list(self._devices.values())

    def last_by_run(self) -> dict[str, float]:
        """Unix time in seconds of the last message of each run."""
        found: dict[str, float] = {}
        for device in self._devices.values():
            if device.messages:
                found[device.run] = max(found.get(device.run, 0.0), device.last_ns / 1e9)
        return found

    def _of(self, run_name: str, writer: Writer, device: str, path: Path) -> Device | None:
        key = run_name, writer.process, device
        folder = os.path.dirname(path)  # a Path takes ten times as long
        found = self._devices.get((*key, folder))
        if found is None and len(self._devices) < MAX_DEVICES:
            found = Device(run_name, process_text(writer), device, writer.host, writer.pid)
            self._devices[(*key, folder)] = found
            logs = self._logs.setdefault(key, [])
            logs.append((folder, found))
            if len(logs) > 1:  # a process with several recorders
                for log, each in logs:
                    each.process = f"{process_text(writer)}, {printable(os.path.basename(log))}"
        return found
