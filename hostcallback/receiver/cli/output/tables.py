"""Plain tables for terminals and pipes, their rows as JSON, colors, and reports of patterns that match nothing."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TextIO

from hostcallback.receiver.tap_arguments import matches
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.text import printable

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


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Formats a table whose columns are as wide as their longest text.

    Args:
        head: titles of the columns.
        rows: texts.
        left: indices of the columns that are aligned to the left; the others are aligned to the right.
    """
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return [line(head), *map(line, rows)]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
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
    """Reports on standard error which patterns match no tap or device of a log; returns the exit status."""
    taps = reader.tap_names() if wanted.names else set()
    devices = {name for _, name in reader.devices()} if wanted.devices else set()
    return report_unmatched_names(wanted, taps, devices)


def report_unmatched_names(wanted: Selection, taps: Collection[str], devices: Collection[str]) -> int:
    """As `report_unmatched`, given the names of the log's taps and devices."""
    status = _report("tap", wanted.names, sorted(taps))
    return _report("device", wanted.devices, sorted(devices)) or status


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
