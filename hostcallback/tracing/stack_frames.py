"""Captures the user's stack frames at trace time: traced values go to the device, all other values stay on the host."""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver.sinks.debugger import Frame
from hostcallback.receiver.wire.array_types import wire_type_of
from hostcallback.tracing.leaves import is_global
from hostcallback.tracing.source_line import is_user_frame

Restore = Callable[[Sequence[Any]], Any]
"""Returns the value of a variable, given the values that the device sent."""


@dataclass(frozen=True, slots=True)
class CapturedFrame:
    """A frame without its traced values.

    Attributes:
        file: its file.
        line: the line it was at.
        function: its function's qualified name.
        source: the file's lines.
        variables: restores each local variable.
        module: the name of its module, if the module has its global variables.
        globals: restores its global variables, if no module has them.
    """

    file: str
    line: int
    function: str
    source: Sequence[str]
    variables: Mapping[str, Restore]
    module: str | None
    globals: Mapping[str, Restore]

    def restore(self, values: Sequence[Any]) -> Frame:
        """Returns the frame with `values`: what the device sent for the traced values of `capture_frames`."""
        module = sys.modules.get(self.module) if self.module is not None else None
        module_variables = vars(module) if module is not None else _restored(self.globals, values)
        variables = _restored(self.variables, values)
        return Frame(self.file, self.line, self.function, self.source, variables, module_variables)


def capture_frames() -> tuple[list[CapturedFrame], list[compat.Tracer]]:
    """Returns the calling thread's user frames, innermost first, and their traced values that this trace can use.

    The frames hold no tracers. A value of another trace is replaced by an `Unavailable`. Containers with tracers are
    rebuilt when the frame is restored. Other objects with tracers, and functions (JAX caches programs by them), are
    referenced weakly.
    """
    values = _Values()
    frames = [_take(frame, values) for frame in _frames(values)]
    return frames, values.tracers


class _Values:
    """The tracers in the frames, each once.

    Attributes:
        tracers: the tracers to send.
        encloses: whether variables of the current frame may be tracers of an enclosing trace that are usable here.
    """

    def __init__(self) -> None:
        self.tracers: list[compat.Tracer] = []
        self.encloses = True
        self._indices: dict[int, int] = {}

    def restore_tracer(self, tracer: compat.Tracer) -> Restore:
        why_not = self._why_not(tracer)
        if why_not is not None:
            missing = Unavailable(f"{why_not}, {_aval(tracer)}")
            return lambda values: missing
        index = self._indices.setdefault(id(tracer), len(self.tracers))
        if index == len(self.tracers):
            self.tracers.append(tracer)
        return lambda values: values[index]

    def _why_not(self, tracer: compat.Tracer) -> str | None:
        where = compat.trace_of(tracer)
        if where is None:
            return "tracer of another trace, an inner one or one that has ended"
        if where == "outer" and not self.encloses:
            return "tracer of an outer trace, and JAX may use the function traced here under another one"
        if isinstance(tracer, jax.Ref):
            return "tracer of a reference: read it into a variable"
        dtype = getattr(tracer, "dtype", None)
        if dtype is None:
            return "tracer without a value"
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            try:
                wire_type_of(dtype)
            except TypeError:
                return "tracer of a dtype that cannot be sent"
        return None


def _frames(values: _Values) -> Iterator[FrameType]:
    """Yields the user's frames, innermost first. Sets `values.encloses` for each before it yields it."""
    frame: FrameType | None = sys._getframe(1)
    entry: FrameType | None = None  # the outermost user frame so far: library code may have called it
    entered = False
    while frame is not None:
        if not is_user_frame(frame, runs_it=False):
            entered = entry is not None
            values.encloses = values.encloses and not (entered and compat.is_frame_of_jit(frame))
        else:
            if entered and entry is not None:
                # JAX caches the jaxpr of a function and may reuse it under another outer trace, whose values differ.
                # A loop body that is defined in the enclosing function is a new function in each call, so its jaxpr is
                # not reused. (A jitted function may be reused, because the user may keep it.)
                values.encloses = values.encloses and _defined_in(entry.f_code, frame)
                entered = False
            entry = frame
            yield frame
        frame = frame.f_back


def _defined_in(code: CodeType, frame: FrameType) -> bool:
    # Looks in the frame's function, and in user functions that called it without library code between them.
    caller: FrameType | None = frame
    while caller is not None and is_user_frame(caller, runs_it=False):
        if _contains(caller.f_code, code):
            # A module's code runs once, so its functions are not new in each call.
            return caller.f_code.co_name != "<module>"
        caller = caller.f_back
    return False


def _contains(code: CodeType, inner: CodeType) -> bool:
    return any(c is inner or _contains(c, inner) for c in code.co_consts if isinstance(c, CodeType))


def _take(frame: FrameType, values: _Values) -> CapturedFrame:
    code = frame.f_code
    at_module_level = frame.f_locals is frame.f_globals
    variables = {} if at_module_level else {k: _keep(v, values) for k, v in dict(frame.f_locals).items()}
    module = frame.f_globals.get("__name__")
    found = {}
    if getattr(sys.modules.get(module or ""), "__dict__", None) is not frame.f_globals:
        # Global variables of code that `exec` runs. One of them may be this program, so only those that the code names
        # are kept.
        module = None
        names = frame.f_globals if at_module_level else code.co_names
        found = {
            n: _keep(frame.f_globals[n], values) for n in names if n in frame.f_globals and n[:2] != "__"
        }
    source = linecache.getlines(code.co_filename, frame.f_globals)
    return CapturedFrame(code.co_filename, frame.f_lineno, code.co_qualname, source, variables, module, found)


def _keep(value: Any, values: _Values) -> Restore:
    tree: Any = None
    leaves = [value]
    # Some values cannot be flattened: dicts with unordered keys, containers that contain themselves, and user pytrees
    # whose flatten function fails.
    with contextlib.suppress(Exception):
        leaves, tree = jax.tree.flatten(value)
    kept = [_keep_leaf(leaf, values) for leaf in leaves]
    if all(restore is None for restore in kept):
        return lambda arrays: value
    if tree is None or jax.tree_util.treedef_is_leaf(tree):
        assert kept[0] is not None
        return kept[0]
    # `rebuild` must not refer to `value`, which holds the tracers.
    fixed = [leaf if restore is None else None for leaf, restore in zip(leaves, kept, strict=True)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        return tree.unflatten(
            [leaf if restore is None else restore(arrays) for leaf, restore in zip(fixed, kept, strict=True)]
        )

    return rebuild


def _keep_leaf(leaf: Any, values: _Values) -> Restore | None:
    """Returns the function that restores a leaf; None if the leaf itself is kept."""
    if isinstance(leaf, jax.core.Tracer):
        return values.restore_tracer(leaf)
    if is_safe_to_retain(leaf):
        return None
    get = weak_getter(leaf)
    return lambda arrays: get()


def _restored(variables: Mapping[str, Restore], values: Sequence[Any]) -> dict[str, Any]:
    return {name: _or_why_not(restore, values) for name, restore in variables.items()}


def _or_why_not(restore: Restore, values: Sequence[Any]) -> Any:
    try:
        return restore(values)
    except Exception as error:  # a user's pytree whose unflatten function refuses arrays
        return Unavailable(f"a container that could not be rebuilt, {error!r}")


def _aval(tracer: compat.Tracer) -> str:
    try:
        return str(jax.typeof(tracer))
    except Exception:
        return type(tracer).__name__


# ---- Which of the user's objects a program may keep alive ------------------------------------------------------------

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
            if is_global(found):
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
