"""The names of taps: how a tap without `name=` is called, and which globs match a name."""

from __future__ import annotations

import fnmatch
import os


def place_name(what: str, file: str, line: int, function: str) -> str:
    """Returns the name of a tap that the user did not name: `print@train_step:42`.

    Args:
        what: the function that made the tap, or the tap function.
        file: the file of the user's line.
        line: its number.
        function: qualified name of the enclosing function; the file's name stands for a lambda or a module.
    """
    short = next((part for part in reversed(function.split(".")) if not part.startswith("<")), "")
    return f"{what}@{short or os.path.basename(file)}:{line}"


def base_name(name: str) -> str:
    """Returns a name without the line: `print` of `print@train_step:42`."""
    return name.partition("@")[0]


def matches(name: str, pattern: str) -> bool:
    """Whether a glob (`*`, `?`, `[seq]`, case-sensitive) matches a tap's name.

    A glob without `@` also matches the part before it: `print` matches `print@train_step:42`.
    """
    return fnmatch.fnmatchcase(name, pattern) or (
        "@" in name and "@" not in pattern and fnmatch.fnmatchcase(base_name(name), pattern)
    )
