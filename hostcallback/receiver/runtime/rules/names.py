"""The names of taps that rules can apply to, and the message for a glob that matches none of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hostcallback.receiver.messages import Registry
from hostcallback.receiver.tap_name import matches


def tap_names(registry: Registry, *, checks: bool = True) -> list[str]:
    """Returns the sorted names of the taps registered in this process, with or without checks."""
    return sorted({c.name for c in registry.consumers() if c.is_switchable and (checks or not c.is_check)})


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the names that match a glob; see `tap_name.matches`."""
    return [name for name in names if matches(name, pattern)]


def no_such_tap(pattern: str, names: Sequence[str]) -> str:
    """Returns a message with similar names: `no tap is called 'los' so far; there are 'loss'`."""
    near = difflib.get_close_matches(pattern, names, n=3) or list(names[:3])
    others = f"; there are {', '.join(map(repr, near))}" if near else ""
    return f"no tap is called {pattern!r} so far{others}"
