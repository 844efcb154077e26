"""The names of the taps that rules can be for, and what is said of a glob that matches none of them."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from hostcallback.receiver.messages.registry import Registry


def tap_names(registry: Registry, *, checks: bool = True) -> list[str]:
    """The names of the taps that a program in this process has, sorted; with or without checks."""
    return sorted({c.name for c in registry.consumers() if c.is_switchable and (checks or not c.is_check)})


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Those that match a glob (`*`, `?`, `[seq]`, case counts)."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def no_such_tap(pattern: str, names: Sequence[str]) -> str:
    """What there is instead: `no tap is called 'los' so far; there are 'loss'`."""
    near = difflib.get_close_matches(pattern, names, n=3) or list(names[:3])
    others = f"; there are {', '.join(map(repr, near))}" if near else ""
    return f"no tap is called {pattern!r} so far{others}"
