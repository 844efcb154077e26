"""What a terminal shows after it printed progress bars."""

from __future__ import annotations

import re


def screen(text: str) -> list[str]:
    """Returns the lines of bars that are left, from top to bottom."""
    lines: list[str] = [""]
    row = column = 0
    for piece in re.split(r"(\x1b\[A|\x1b\[\d*[a-zA-Z]|\r|\n)", text):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[A":
            row = max(0, row - 1)
        elif not piece.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return [line.strip() for line in lines if re.search(r"\dit\b|it/s|%\|", line)]
