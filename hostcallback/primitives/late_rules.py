"""Registers rules for parts of JAX that most programs never import, once a program has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, register: Callable[[Any], None]) -> None:
    """Calls `register` with the module of that name, at once or where a tap is traced after its import.

    A tap must be traced by then to need the rules, but for one in a jitted function that was traced before.
    """
    _waiting[name] = register
    register_imported()


def register_imported() -> None:
    """Registers the rules of modules that have been imported since. Each trace of a tap calls it."""
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            register = _waiting.pop(name, None)  # once, whichever thread is first
            if register is not None:
                register(module)


def _is_being_imported(module: ModuleType) -> bool:
    # If another thread is importing the module, JAX's rules would overwrite ours.
    return bool(getattr(module.__spec__, "_initializing", False))


_waiting: dict[str, Callable[[Any], None]] = {}
