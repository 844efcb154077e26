"""Rates of an interval, and a display that shows one interval after another."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from hostcallback.receiver.cli.output.live_screen import live_screen


def show(
    arguments: argparse.Namespace,
    shown: Callable[[], dict[str, Any]],
    lines: Callable[[dict[str, Any]], list[str]],
) -> int:
    """Shows the metrics of one interval after another, in the format of the arguments."""
    if arguments.json or arguments.once or not sys.stdout.isatty():
        while True:
            time.sleep(arguments.interval)
            now = shown()
            print(json.dumps(now) if arguments.json else "\n".join(lines(now)), flush=True)
            if arguments.once:
                return 0
            if not arguments.json:
                print(flush=True)
    with live_screen() as show_on_screen:
        while True:
            time.sleep(arguments.interval)
            show_on_screen(lines(shown()))


def between(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an interval: the current values, with rates since `before`."""
    seconds = max(now["time"] - before["time"], 1e-9)
    earlier_taps = {(tap["name"], tap["source_line"]): tap for tap in before["taps"]}
    earlier_devices = {device["device"]: device for device in before["devices"]}

    def rates(row: dict[str, Any], earlier: dict[str, Any] | None, fields: dict[str, str]) -> dict[str, Any]:
        # A tap that was not there before has all its messages from this interval.
        return row | {
            # A counter can fall where a process's receivers were replaced; a negative rate would only
            # confuse.
            name: max(0.0, (row[field] - (earlier[field] if earlier else 0)) / seconds)
            for field, name in fields.items()
        }

    tap_fields = {"messages": "messages_per_sec", "bytes": "bytes_per_sec", "tap_sec": "busy"}
    device_fields = {"emitted": "messages_per_sec", "emitted_bytes": "bytes_per_sec"}
    taps = [
        rates(tap, earlier_taps.get((tap["name"], tap["source_line"])), tap_fields) for tap in now["taps"]
    ]
    taps.sort(key=lambda tap: (-tap["messages_per_sec"], tap["name"], tap["source_line"]))
    return {
        "time": now["time"],
        "seconds": seconds,
        "process": now["process"],
        "devices": [rates(d, earlier_devices.get(d["device"]), device_fields) for d in now["devices"]],
        "taps": taps,
    }
