"""Adds what running processes tell to what the page shows of their logs."""

from __future__ import annotations

from typing import Any

from hostcallback.receiver.terminal import printable
from hostcallback.receiver.ui.index.devices import Device
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.live.failures import live_failures
from hostcallback.receiver.ui.live.processes import LiveProcesses
from hostcallback.receiver.ui.live.source import LiveProcess

TAPS = 50
"""Taps of a process that a device lists."""


def take_taps(index: LogIndex, live: LiveProcesses) -> dict[tuple[str, str], bool]:
    """Notes taps of running processes in the index; returns whether each tap is on, by name and line.

    Called under the index's lock.
    """
    enabled: dict[tuple[str, str], bool] = {}
    processes = live.processes()
    logged = {(tap.name, tap.place) for tap in index.taps.rows} if processes else set()
    for process in processes:
        for tap in process.figures["taps"]:
            key = tap["name"], tap["source_line"]
            enabled[key] = enabled.get(key, True) and bool(tap.get("enabled", True))
            if key not in logged and not tap.get("check"):
                row = index.taps.of(
                    process.run or _run(process), tap["name"], "", "array", tap["source_line"]
                )
                if row is not None and not row.chunks:
                    row.count = max(row.count, int(tap["messages"]))
    return enabled


def take_failures(index: LogIndex, live: LiveProcesses) -> None:
    """Notes what running processes tell of their failures in the index. Called under the index's lock."""
    for process in live.processes():
        for failure in live_failures(process.figures.get("failures")):
            index.failures.take_live((process.host, process.pid), failure)


def devices(index: LogIndex, live: LiveProcesses) -> list[dict[str, Any]]:
    """Describes all devices. Called under the index's lock."""
    known = {(device.host, device.pid, device.device): device for device in index.devices.all()}
    shown = {key: device.as_dict() for key, device in known.items()}
    for process in live.processes():
        for row in process.figures["devices"]:
            key = process.host, process.pid, row["device"]
            device = (
                shown.get(key)
                or Device(
                    process.run or _run(process), f"{process.host}:{process.pid}", row["device"]
                ).as_dict()
            )
            shown[key] = device | {
                "rate": live.rate(process, row["device"]),
                "messages": max(device["messages"], int(row["emitted"])),
                "queue_bytes": row["queued_bytes"],
                "backlog": row["queued"],
                "drops": max(device["drops"], int(row["dropped"])),
                "stalls": row["waiting"],
                "seconds_in_taps": sum(tap["tap_sec"] for tap in process.figures["taps"]),
                "taps": _taps(process) or device["taps"],
            }
    return list(shown.values())


def _taps(process: LiveProcess) -> list[dict[str, Any]]:
    rows = sorted(process.figures["taps"], key=lambda tap: -tap["messages"])[:TAPS]
    return [
        {"name": printable(tap["name"]), "messages": tap["messages"], "seconds": tap["tap_sec"]}
        for tap in rows
    ]


def _run(process: LiveProcess) -> str:
    return f"{process.host}:{process.pid}"
