"""Tables for terminals and pipes, their rows as JSON, reports of patterns without a match, and screens that redraw."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TextIO

from hostcallback.receiver.tap_arguments import matches
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.text import printable, text_table

BOLD, DIM, RED, YELLOW, CYAN = "1", "2", "31", "33", "36"


def has_color(stream: TextIO | None = None) -> bool:
    """Whether to color what goes to a stream (default: the standard output).

    As Python and most tools decide: `NO_COLOR` turns color off, `FORCE_COLOR` on; without them a terminal has it,
    unless `TERM` is dumb. An empty variable counts as unset.
    """
    stream = sys.stdout if stream is None else stream
    # https://no-color.org: any value but an empty one, and before FORCE_COLOR.
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def painted(text: str, *styles: str) -> str:
    """Returns the text between control sequences; the text itself has to be safe."""
    return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if text else text


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    """Prints a table, see `text_table`; with a bold head on a terminal."""
    first, *others = text_table(head, rows, left)
    print("\n".join([painted(first, BOLD) if has_color() else first, *others]))


def print_json_lines(values: Iterable[Any]) -> None:
    """Prints a JSON value per line. All characters but ASCII are escaped: the text is safe for a terminal."""
    for value in values:
        print(json.dumps(value, allow_nan=False))


def bytes_text(count: float) -> str:
    """Formats a number of bytes, as in `1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Formats a duration, as `1:02:03` or `4.5 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def report_unmatched(reader: LogReader, wanted: Selection) -> int:
    """Reports on standard error which names match no tap, device or launch of a log; returns the exit status."""
    taps = reader.tap_names() if wanted.names else set()
    devices = {name for _, name in reader.devices()} if wanted.devices else set()
    return report_unmatched_names(wanted, taps, devices, has_launch=has_launch(reader, wanted))


def has_launch(reader: LogReader, wanted: Selection) -> bool:
    """Whether a log has messages of the wanted launch; also true if none is wanted."""
    found = reader.message_runs(Selection(launch=wanted.launch), by_time=False)
    return wanted.launch is None or any(isinstance(record, Stretch) for record in found)


def report_unmatched_names(
    wanted: Selection, taps: Collection[str], devices: Collection[str], *, has_launch: bool = True
) -> int:
    """As `report_unmatched`, given the names of the log's taps and devices, and whether it has the launch."""
    status = _report("tap", wanted.names, sorted(taps))
    status = _report("device", wanted.devices, sorted(devices)) or status
    if has_launch:
        return status
    print(
        f"hcb: the log has no messages of a launch {wanted.launch}; hcb cat --json shows the launch of each message",
        file=sys.stderr,
    )
    return 1


def _report(kind: str, patterns: Sequence[str], names: Sequence[str]) -> int:
    status = 0
    for pattern in patterns:
        if any((matches if kind == "tap" else fnmatchcase)(name, pattern) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=3) or names[:3]
        others = f"; there are {', '.join(printable(repr(name)) for name in near)}" if near else ""
        print(f"hcb: no {kind} of the log is called {printable(repr(pattern))}{others}", file=sys.stderr)
        status = 1
    return status


def print_knobs(found: Sequence[tuple[str, Mapping[str, Any]]], *, as_json: bool) -> None:
    """Prints knobs as processes describe them, each with the process that has it; with no process if there is one."""
    if as_json:
        print_json_lines({"process": where, **knob} if where else knob for where, knob in found)
    elif not found:
        print("no program with a knob was traced yet")
    else:
        fields = ("name", "value", "default", "min", "max", "source_line")
        rows = [(*(_knob_text(knob.get(key)) for key in fields), where) for where, knob in found]
        head = ("knob", "value", "default", "min", "max", "line", "process")
        columns = len(head) if any(where for where, _ in found) else len(head) - 1
        print_table(head[:columns], [row[:columns] for row in rows], left=(0, 5, 6))


def _knob_text(value: Any) -> str:
    return "-" if value is None else f"{value:.8g}" if isinstance(value, float) else printable(str(value))


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
            shown, start = _fitting(lines), 0
            text = Text("\n".join(shown), no_wrap=True, overflow="crop")
            for line in shown:
                if line.startswith(("device ", "tap ")):
                    text.stylize("bold", start, start + len(line))
                start += len(line) + 1
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
