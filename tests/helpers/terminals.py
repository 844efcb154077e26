"""Runs Python in a terminal, and reads what a terminal shows after it printed progress bars."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path


def in_terminal(
    *arguments: str | Path,
    cwd: Path | None = None,
    interrupted_after: bytes | None = None,
    columns: int = 100,
) -> tuple[int, str]:
    """Runs Python in a terminal, and interrupts it once a text is shown. Returns its status and what it showed."""
    child, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    shown = b""
    command = [sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, cwd=cwd, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        while True:
            try:
                piece = os.read(child, 65536)
            except OSError:  # the terminal is closed
                break
            shown += piece
            if interrupted_after is not None and re.search(interrupted_after, shown):
                process.send_signal(signal.SIGINT)
                interrupted_after = None
            if not piece:
                break
        status = process.wait(60)
    os.close(child)
    return status, shown.decode()


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
