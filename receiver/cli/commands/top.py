"""`hcb top`: shows the activity of a running process's taps, at intervals."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from receiver.cli.arguments.collector import add_reaching
from receiver.cli.output.live_screen import live_screen
from receiver.cli.output.tables import bytes_text, seconds_text, text_table
from receiver.control.client import ControlClient

EXAMPLES = """\
Rates and times are of the last interval. "time" is the share of a second spent in the tap's function, "errors" are
calls that raised and failures of checks, "suppressed" are messages that rules kept from being sent (see hcb ctl).
Messages that a back-pressure policy dropped are counted per device.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "pid", nargs="?", type=int, metavar="PID", help="the process; `hcb ctl` lists the processes"
    )
    parser.add_argument("--once", action="store_true", help="show one interval as plain text, then exit")
    parser.add_argument("--json", action="store_true", help="one line of JSON per interval")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds per interval (1)"
    )
    group = parser.add_argument_group("or all processes that forward to a collector")
    group.add_argument("--via", metavar="HOST:PORT", help="the collector")
    add_reaching(group)
    parser.set_defaults(parser=parser)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval: expected seconds, 0.05 to 3600")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if (arguments.pid is None) == (arguments.via is None):
        arguments.parser.error("give a PID, or a collector with --via HOST:PORT")
    if arguments.via is not None:
        from receiver.cli.commands.top_via import look

        return look(arguments)
    with ControlClient(arguments.pid) as client:
        before = client.ask("figures")  # starts the counting

        def shown() -> dict[str, Any]:
            nonlocal before
            earlier, before = before, client.ask("figures")
            return between(earlier, before)

        return show(arguments, shown, lines)


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


def lines(shown: dict[str, Any]) -> list[str]:
    """The metrics of an interval as lines of text."""
    process = shown["process"]
    up = seconds_text(shown["time"] - process["started"])
    devices = [
        (
            device["device"],
            f"{device['messages_per_sec']:,.0f}/s",
            f"{bytes_text(device['bytes_per_sec'])}/s",
            f"{device['queued']:,}",
            bytes_text(device["queued_bytes"]),
            f"{device['waiting']:,}",
            f"{device['dropped']:,}",
            _running(device["running"]),
        )
        for device in shown["devices"]
    ]
    taps = [
        (
            tap["name"],
            f"{tap['messages_per_sec']:,.0f}/s",
            f"{bytes_text(tap['bytes_per_sec'])}/s",
            f"{tap['busy']:.1%}",
            f"{tap['failed']:,}",
            f"{tap['suppressed']:,}",
            "enabled=false" if not tap["enabled"] else tap["rules"] or "-",
            tap["source_line"],
        )
        for tap in shown["taps"]
    ]
    return [
        f"process {process['pid']} on {process['host']}, up {up}: {process['command'][:100]}",
        "",
        *text_table(
            ("device", "messages", "bytes", "queue", "queued", "waiting", "dropped", "running"),
            devices,
            left=(0, 7),
        ),
        "",
        *text_table(
            ("tap", "messages", "bytes", "time", "errors", "suppressed", "rules", "line"),
            taps,
            left=(0, 6, 7),
        ),
    ]


def _running(running: list[Any] | None) -> str:
    return "-" if running is None or running[1] < 0.001 else f"{running[0]} for {running[1]:.1f} s"
