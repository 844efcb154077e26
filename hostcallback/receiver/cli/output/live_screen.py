"""A terminal screen whose text is replaced, drawn by rich if it is installed, and the rates of an interval."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hostcallback.receiver.cli.output.tables import bytes_text
from hostcallback.receiver.text import printable

Show = Callable[[list[str]], None]


@contextlib.contextmanager
def live_screen() -> Iterator[Show]:
    """Yields a function that replaces the text on the terminal; the terminal is restored afterwards."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        with _plain_screen() as show:
            yield show
        return
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(lines: list[str]) -> None:
            text = Text("\n".join(_fitting(lines)), no_wrap=True, overflow="crop")
            for index, line in enumerate(lines):
                if line.startswith(("device ", "tap ")):
                    # The text is cropped by `_fitting`, so the places count cropped lines.
                    start = sum(len(earlier[: console.width]) + 1 for earlier in lines[:index])
                    text.stylize("bold", start, start + len(line))
            live.update(text, refresh=True)

        yield show


@contextlib.contextmanager
def _plain_screen() -> Iterator[Show]:
    print("(for a screen without flicker: pip install 'hostcallback[top]')", file=sys.stderr)

    def show(lines: list[str]) -> None:
        # Moves home and overwrites each line up to its end: clearing the screen first would flicker.
        text = "".join(f"{line}\x1b[K\n" for line in _fitting(lines))
        sys.stdout.write(f"\x1b[H{text}\x1b[J")
        sys.stdout.flush()

    sys.stdout.write("\x1b[2J")
    yield show


def _fitting(lines: list[str]) -> list[str]:
    size = shutil.get_terminal_size()
    shown = [printable(line)[: size.columns] for line in lines[: size.lines - 1]]
    if len(lines) > len(shown):
        shown[-1] = f"... {len(lines) - len(shown) + 1} more lines"[: size.columns]
    return shown


def show(
    arguments: argparse.Namespace,
    shown: Callable[[], dict[str, Any]],
    lines: Callable[[dict[str, Any]], list[str]],
) -> int:
    """Shows the stats of one interval after another, in the format of the arguments."""
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
    """Returns the current stats with rates since `before`."""
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


def rules_text(tap: dict[str, Any]) -> str:
    """The rules of a tap. A single check may be off although no rule says so."""
    return "enabled=false" if not tap["enabled"] else tap["rules"] or "-"


def device_cells(device: dict[str, Any]) -> list[str]:
    """The stats of a device, or the sums of several, for `DEVICE_HEAD`."""
    return [
        f"{device['messages_per_sec']:,.0f}/s",
        f"{bytes_text(device['bytes_per_sec'])}/s",
        f"{device['queued']:,.0f}",
        bytes_text(device["queued_bytes"]),
        f"{device['waiting']:,.0f}",
        f"{device['dropped']:,.0f}",
    ]


DEVICE_HEAD = ("messages", "bytes", "queue", "queued", "waiting", "dropped")


def tap_cells(tap: dict[str, Any]) -> list[str]:
    """The stats of a tap, or the sums over several processes, for `TAP_HEAD`."""
    return [
        f"{tap['messages_per_sec']:,.0f}/s",
        f"{bytes_text(tap['bytes_per_sec'])}/s",
        f"{tap['busy']:.1%}",
        f"{tap['failed']:,.0f}",
        f"{tap['suppressed']:,.0f}",
    ]


TAP_HEAD = ("messages", "bytes", "time", "errors", "suppressed", "rules", "line")
