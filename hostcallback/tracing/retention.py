"""Decides which of a user's objects a program may keep alive, and makes weak references to the others."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat

LOOK_AT = 500
"""Number of objects that are searched for tracers."""

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    range,
    slice,
    type(None),
    type,
    np.dtype,
    np.generic,
    types.ModuleType,
)
_HOLD_PROGRAMS = (
    types.FrameType, types.TracebackType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, type(jax.jit(len)))


class Unavailable:
    """Replaces a value that is not available, in the debugger."""

    __slots__ = ("_why",)

    def __init__(self, why: str) -> None:
        """Takes the reason, with the kind of the value."""
        self._why = why

    def __repr__(self) -> str:
        """Returns `<not available here: ...>`."""
        return f"<not available here: {self._why}>"


def is_safe_to_retain(value: Any) -> bool:
    """Whether an object holds neither tracers nor functions for which JAX may cache programs.

    A program that keeps a tracer leaks it. A program that keeps its function is never freed, because JAX caches
    programs by weak references to functions. An object with more than `LOOK_AT` parts counts as unsafe.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, _PLAIN) or id(found) in seen:
            continue
        if isinstance(found, compat.ArrayImpl) or (
            isinstance(found, np.ndarray) and not found.dtype.hasobject
        ):
            continue
        if isinstance(found, (jax.core.Tracer, *_HOLD_PROGRAMS)):
            return False
        if isinstance(found, _FUNCTIONS):
            if _found_by_name(found):
                continue
            return False
        seen.add(id(found))
        if len(seen) > LOOK_AT:
            return False
        left += gc.get_referents(found)
    return True


def weak_getter(value: Any) -> Callable[[], Any]:
    """Returns a function that returns `value` while other objects keep it alive, and an `Unavailable` afterwards."""
    kind = f"a {type(value).__module__}.{type(value).__qualname__}"
    try:
        get = weakref.WeakMethod(value) if isinstance(value, types.MethodType) else weakref.ref(value)
    except TypeError:
        held = Unavailable(f"{kind} that holds traced values or functions")
        return lambda: held
    gone = Unavailable(f"{kind} that does not exist any more")

    def found() -> Any:
        value = get()
        return gone if value is None else value

    return found


def _found_by_name(function: Any) -> bool:
    """Whether the module of a function, possibly a wrapped one, has it under its name."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in (getattr(function, "__qualname__", None) or "<none>").split("."):
        found = getattr(found, part, None)
    return found is function
