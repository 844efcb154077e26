"""Color of terminal text, where there is a terminal that shows it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

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
