"""`hcb top`: shows the activity of a running process's taps, at intervals."""

from __future__ import annotations

import argparse
from typing import Any

from hostcallback.receiver.cli.arguments import add_reaching, number
from hostcallback.receiver.cli.output import tables
from hostcallback.receiver.cli.via_collector import look
from hostcallback.receiver.control.client import ControlClient
from hostcallback.receiver.text import text_table

EXAMPLES = """\
Rates and times are of the last interval. "time" is the share of a second spent in the tap's function, "errors" are
calls that raised and failures of checks, "suppressed" are messages that rules kept from being sent (see hcb ctl).
Messages that a back-pressure policy dropped are counted per device.
"""


INTERVAL_SEC = number("seconds, 0.05 to 3600", lambda x: 0.05 <= x <= 3600)


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
        "--interval", type=INTERVAL_SEC, default=1.0, metavar="S", help="seconds per interval (1)"
    )
    group = parser.add_argument_group("or all processes that forward to a collector")
    group.add_argument("--via", metavar="HOST:PORT", help="the collector")
    add_reaching(group)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if (arguments.pid is None) == (arguments.via is None):
        arguments.parser.error("give a PID, or a collector with --via HOST:PORT")
    if arguments.via is not None:
        return look(arguments)
    with ControlClient(arguments.pid) as client:
        before = client.ask("figures")  # starts the counting

        def shown() -> dict[str, Any]:
            nonlocal before
            earlier, before = before, client.ask("figures")
            return tables.between(earlier, before)

        return tables.show(arguments, shown, lines)


def lines(shown: dict[str, Any]) -> list[str]:
    """The stats of an interval as lines of text."""
    process = shown["process"]
    up = tables.seconds_text(shown["time"] - process["started"])
    devices = [
        (device["device"], *tables.device_cells(device), _running(device["running"]))
        for device in shown["devices"]
    ]
    taps = [
        (tap["name"], *tables.tap_cells(tap), tables.rules_text(tap), tap["source_line"])
        for tap in shown["taps"]
    ]
    return [
        f"process {process['pid']} on {process['host']}, up {up}: {process['command'][:100]}",
        "",
        *text_table(("device", *tables.DEVICE_HEAD, "running"), devices, left=(0, 7)),
        "",
        *text_table(("tap", *tables.TAP_HEAD), taps, left=(0, 6, 7)),
    ]


def _running(running: list[Any] | None) -> str:
    return "-" if running is None or running[1] < 0.001 else f"{running[0]} for {running[1]:.1f} s"
