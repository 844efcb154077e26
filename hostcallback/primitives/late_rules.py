"""Registers rules for parts of JAX that most programs never import, once a program has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, register: Callable[[Any], None]) -> None:
    """Calls `register` with the module of that name: now, or at the first trace of a tap after the module's import.

    The rules are needed only for taps traced after that import, except for taps in a jitted function that was traced
    before and is transformed now; those do not get the rules.
    """
    _waiting[name] = register
    register_imported()


def register_imported() -> None:
    """Registers the rules of modules that have been imported since. Each trace of a tap calls it."""
    # A copy, because other threads trace and remove names meanwhile.
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            register = _waiting.pop(name, None)  # one thread gets it
            if register is not None:
                register(module)


def _is_being_imported(module: ModuleType) -> bool:
    # If another thread is importing the module, JAX's rules would overwrite ours.
    return bool(getattr(module.__spec__, "_initializing", False))


_waiting: dict[str, Callable[[Any], None]] = {}
