"""The formats of command-line arguments that are numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def count(text: str) -> int:
    """Parses a number of messages."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of messages, 0 or more")
    return int(text)


def number(expected: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a parser of numbers that `accepts` is true of, for `type=`; `expected` describes them in errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse
