"""Decides which of a user's objects a program may keep alive; weak references and fingerprints of the others."""

from __future__ import annotations

import enum
import functools
import gc
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
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
            if _is_global_function(found):
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


def _is_global_function(function: Any) -> bool:
    """Whether the module of a function, possibly a wrapped one, has it under its name."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in (getattr(function, "__qualname__", None) or "<none>").split("."):
        found = getattr(found, part, None)
    return found is function


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Fingerprint:
    """A text that is equal in all processes, and the objects that the text does not fully describe.

    Attributes:
        text: deterministic description.
        opaque: objects that only their identity distinguishes (captured lists, instances, arrays). Two fingerprints are
            equal only if these are the same objects.
    """

    __slots__ = ("opaque", "text")

    def __init__(self, *values: Any) -> None:
        """Fingerprints all `values` together, in order."""
        self.opaque: list[Any] = []
        self.text = repr([self._describe(value, 0) for value in values])

    def _describe(self, value: Any, depth: int) -> Any:
        if type(value) in _ATOMS:
            return repr(value)
        if depth > 8:  # a structure nested this deep, or a cycle
            return self._by_identity(value)
        if type(value) is tuple:
            return ["tuple", *(self._describe(v, depth + 1) for v in value)]
        if isinstance(value, enum.Enum):
            return ["member", self._describe(type(value), depth + 1), value.name]
        if isinstance(value, types.FunctionType):
            return self._describe_function(value, depth)
        if isinstance(value, types.MethodType):
            return [
                "method",
                self._describe(value.__func__, depth + 1),
                self._describe(value.__self__, depth + 1),
            ]
        if type(value) is functools.partial:
            parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
            return ["partial", *(self._describe(part, depth + 1) for part in parts)]
        if isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, types.ModuleType | type(None)
        ):
            return ["builtin method", value.__qualname__, self._describe(value.__self__, depth + 1)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if _is_global_name(value):
            return ["named", value.__module__, value.__qualname__]
        return self._by_identity(value)

    def _describe_function(self, function: types.FunctionType, depth: int) -> Any:
        # A closure's variables count by the identity of their cells, not by their current values, because the function
        # or another one that shares the cells may rebind them.
        cells = function.__closure__ or ()
        self.opaque.extend(cells)
        module = sys.modules.get(function.__module__)
        if function.__globals__ is not getattr(module, "__dict__", None):
            self.opaque.append(function.__globals__)
        if set(function.__dict__) - {"__wrapped__"}:
            self.opaque.append(function)
        defaults = (function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items())))
        return [
            "function",
            function.__module__,
            function.__qualname__,
            _describe_code(function.__code__),
            self._describe(defaults, depth + 1),
            len(cells),
        ]

    def _by_identity(self, value: Any) -> Any:
        self.opaque.append(value)
        return ["object", type(value).__module__, type(value).__qualname__]


def _is_global_name(value: Any) -> bool:
    """Whether the module of a class or builtin function has it under its qualified name."""
    if not isinstance(value, type | types.BuiltinFunctionType):
        return False
    found: Any = sys.modules.get(value.__module__ or "")
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def describe_structure(tree_structure: Any) -> str:
    """Returns a tree structure's text without memory addresses, which differ between processes."""
    return _ADDRESS.sub("0x", str(tree_structure))


def _describe_code(code: types.CodeType) -> Any:
    # Does not use marshal, because its bytes depend on reference counts. Leaves out file names, because checkouts
    # differ.
    constants = [
        _describe_code(c)
        if isinstance(c, types.CodeType)
        else sorted(map(repr, c))
        if isinstance(c, frozenset)
        else repr(c)
        for c in code.co_consts
    ]
    return [code.co_name, code.co_firstlineno, code.co_code.hex(), constants, code.co_names, code.co_varnames]


def callable_name(func: Callable[..., Any] | Any) -> str:
    """Returns the name of a callable for reports."""
    while isinstance(func, functools.partial):
        func = func.func
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return str(name)


def freeze(mapping: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns a mapping's items in key order."""
    return tuple(sorted(mapping.items()))
