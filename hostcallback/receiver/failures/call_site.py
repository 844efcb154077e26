"""Call sites of checks in the user's code, and the source lines that reports show."""

from __future__ import annotations

import io
import linecache
import os
import stat
import tokenize
from dataclasses import dataclass
from typing import NamedTuple

from hostcallback.receiver import limits

MAX_LINES = 8
MAX_PLACES = 8
MAX_FRAMES = 1000
MAX_SPAN = 1000
"""Limits of a described place: frames of its stack, and lines of the call."""


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
        text = self.source_text(self.line).strip()
        head = f'File "{self.file}", line {self.line}, in {self.function}'
        return f"{head}\n  {text}" if text else head

    def source_text(self, line: int) -> str:
        """The text of a line of the frame's file, with its end; empty if the file cannot be read."""
        return linecache.getline(self.file, line)


class DescribedFrame(Frame):
    """A frame that another process described: its file is read only if it is a Python file of usual size."""

    __slots__ = ()

    def source_text(self, line: int) -> str:
        """As `Frame.source_text`. Devices, pipes and files that are not Python source are not opened."""
        if not self.file.endswith(".py"):
            return ""
        try:
            found = os.stat(self.file)
        except (OSError, ValueError):
            return ""
        if not stat.S_ISREG(found.st_mode) or found.st_size > limits.SOURCE_BYTES:
            return ""
        return linecache.getline(self.file, line)


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

        Without marks if that argument has several lines; cut after `MAX_LINES`; empty if the file cannot be read, or
        has other lines now.
        """
        if not self.stack:
            return []
        if self.span is None:
            line = self.stack[0].source_text(self.stack[0].line).strip()
            return [line] if line else []
        first, last, start, end = self.span
        lines = [self.stack[0].source_text(number) for number in range(first, last + 1)]
        if not all(lines) or not any(map(str.strip, lines)):  # the file has changed since
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
    """Parses a text such as `train.py:12 (step)`; returns a frame without file and line for other texts."""
    file, _, rest = source_line.rpartition(":")
    line, _, function = rest.partition(" ")
    if not file or not line.isdecimal():
        return Frame("", 0, "")
    return Frame(file, int(line), function.strip("()"))


def described_place(stack: object, span: object) -> CallSite:
    """The place that another process described as plain data.

    Raises:
        ValueError: it is none.
    """
    frames = []
    for frame in stack if isinstance(stack, list) and len(stack) <= MAX_FRAMES else [None]:
        if not isinstance(frame, list) or [type(item) for item in frame] != [str, int, str]:
            raise ValueError(f"a place of a check is described as {str(frame)[:80]}")
        file, line, function = frame
        frames.append(DescribedFrame(file, line, function))
    if span is None:
        return CallSite(tuple(frames))
    if not isinstance(span, list | tuple) or [type(number) for number in span] != [int] * 4:
        raise ValueError(f"the lines of a check are described as {str(span)[:80]}")
    first, last, start, end = span
    if min(span) < 0 or last - first > MAX_SPAN:
        raise ValueError(f"a check is described as of the lines {first} to {last}")
    return CallSite(tuple(frames), (first, last, start, end))


def note_place(places: list[CallSite], place: CallSite) -> None:
    """Adds a call site to those kept for one line (only a few), unless it is there already."""
    if place not in places and len(places) < MAX_PLACES:
        places.append(place)


def _first_argument(lines: list[str], start: int, end: int) -> tuple[int, int, int] | None:
    # Row, first column and end of the call's first argument, in characters; None unless it is on one line. By tokens:
    # receiver threads do not parse, see `log.traceback_text`.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    shift = len(encoded[0][:start].decode(errors="replace"))
    encoded[0] = encoded[0][start:]
    try:
        text = io.StringIO(b"".join(encoded).decode())
        tokens = [token for token in tokenize.generate_tokens(text.readline) if token.type not in _NO_CODE]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    argument = _first_of(tokens)
    if not argument or argument[0].start[0] != argument[-1].end[0]:
        return None
    row = argument[0].start[0] - 1
    shift = shift if row == 0 else 0
    return row, argument[0].start[1] + shift, argument[-1].end[1] + shift


_NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _first_of(tokens: list[tokenize.TokenInfo]) -> list[tokenize.TokenInfo]:
    # The tokens of the first argument of a call that ends with the last token; none if it is passed by name.
    opened: list[int] = []
    last_opened = None
    for position, token in enumerate(tokens):
        if token.string in ("(", "[", "{"):
            opened.append(position)
        elif token.string in (")", "]", "}"):
            last_opened = opened.pop() if opened else None
    if last_opened is None or opened or tokens[-1].string != ")":
        return []
    argument: list[tokenize.TokenInfo] = []
    depth = lambdas = 0
    for token in tokens[last_opened + 1 : -1]:
        if not depth and not lambdas and token.string == ",":
            break
        argument.append(token)
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        if not depth:  # the commas of a lambda's parameters are its own
            if token.string == "for":
                return tokens[last_opened:]  # a generator, whose parentheses are the call's
            lambdas += (token.string == "lambda") - (token.string == ":" and lambdas > 0)
    by_name = len(argument) > 1 and argument[1].string == "="
    return [] if by_name or (argument and argument[0].string == "**") else argument
