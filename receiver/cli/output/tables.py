"""Plain tables for terminals and pipes, and their rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hostcallback.receiver.cli.output.color import BOLD, has_color, painted
from hostcallback.receiver.terminal import printable


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
