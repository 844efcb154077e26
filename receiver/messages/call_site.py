"""Call sites of checks in the user's code, and the source lines that reports show."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from typing import NamedTuple

MAX_LINES = 8
MAX_PLACES = 8


class Frame(NamedTuple):
    """One frame of a stack.

    Attributes:
        file: the path as Python knows it.
        line: 1-based; 0 if unknown.
        function: the qualified name.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As in a traceback, with the line's text if it can be read."""
        text = linecache.getline(self.file, self.line).strip()
        head = f'File "{self.file}", line {self.line}, in {self.function}'
        return f"{head}\n  {text}" if text else head


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in the user's code, as it was traced once.

    Attributes:
        stack: the user's frames during tracing, innermost first.
        span: first and last line of the call, and the columns where it starts and ends, as Python 3.11's positions
            give them: columns count UTF-8 bytes from 0. None if Python does not know.
    """

    stack: tuple[Frame, ...]
    span: tuple[int, int, int, int] | None = None

    def source(self) -> list[str]:
        """The lines of the call without their common indentation, with marks below its first argument.

        Without marks if that argument has several lines; cut after `MAX_LINES`; empty if the file cannot be read.
        """
        if not self.stack:
            return []
        if self.span is None:
            line = linecache.getline(self.stack[0].file, self.stack[0].line).strip()
            return [line] if line else []
        first, last, start, end = self.span
        lines = [linecache.getline(self.stack[0].file, number) for number in range(first, last + 1)]
        if not all(lines):
            return []
        mark = _first_argument(lines, start, end)
        indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
        indent = min(indents)
        shown = [line.rstrip()[indent:] for line in lines[:MAX_LINES]]
        if len(lines) > MAX_LINES:
            shown.append("...")
        if mark is not None:
            row, begin, stop = mark
            if row < MAX_LINES:
                shown.insert(row + 1, " " * (begin - indent) + "~" * (stop - begin))
        return shown


def location_of(source_line: str) -> Frame:
    """The frame that a text such as `train.py:12 (step)` names; one without file and line if it names none."""
    file, _, rest = source_line.rpartition(":")
    line, _, function = rest.partition(" ")
    if not file or not line.isdecimal():
        return Frame("", 0, "")
    return Frame(file, int(line), function.strip("()"))


def note_place(places: list[CallSite], place: CallSite) -> None:
    """Adds a call site to the few that are kept for one line, unless it is among them."""
    if place not in places and len(places) < MAX_PLACES:
        places.append(place)


def _first_argument(lines: list[str], start: int, end: int) -> tuple[int, int, int] | None:
    # Row, first column and end of the call's first argument, in characters; None unless it is on one line.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        tree = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.Call) or not tree.args:
        return None
    argument = tree.args[0]
    if argument.end_lineno != argument.lineno or argument.end_col_offset is None:
        return None
    row = argument.lineno - 1
    shift = start if row == 0 else 0
    whole = lines[row].encode()
    begin = len(whole[: argument.col_offset + shift].decode(errors="replace"))
    stop = len(whole[: argument.end_col_offset + shift].decode(errors="replace"))
    return row, begin, stop
