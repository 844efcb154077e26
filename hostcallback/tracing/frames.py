"""The user's frames at trace time, taken apart into traced values (to the device) and the rest (stays on the host)."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver.sinks.debugger.debugger import Frame
from hostcallback.receiver.wire.dtypes import wire_type_of
from hostcallback.tracing.retention import Unavailable, is_safe_to_retain, weak_getter
from hostcallback.tracing.source_line import is_user_frame

Restore = Callable[[Sequence[Any]], Any]
"""From the values that the device sent to what a variable held."""


@dataclass(frozen=True, slots=True)
class CapturedFrame:
    """A frame without its traced values.

    Attributes:
        file: its file.
        line: the line it was at.
        function: its function's qualified name.
        source: the file's lines.
        variables: how each local variable comes back.
        module: the name of its module, if the module has its global variables.
        globals: how its global variables come back, if no module has them.
    """

    file: str
    line: int
    function: str
    source: Sequence[str]
    variables: Mapping[str, Restore]
    module: str | None
    globals: Mapping[str, Restore]

    def restore(self, values: Sequence[Any]) -> Frame:
        """The frame with `values`, those that `capture_frames` returned, as the device sent them."""
        module = sys.modules.get(self.module) if self.module is not None else None
        module_variables = vars(module) if module is not None else _restored(self.globals, values)
        variables = _restored(self.variables, values)
        return Frame(self.file, self.line, self.function, self.source, variables, module_variables)


def capture_frames() -> tuple[list[CapturedFrame], list[Any]]:
    """The calling thread's user frames, innermost first, and the traced values in them that can be used here.

    What is kept holds no tracers: values of other traces are told to be not available. Containers are rebuilt where
    they hold tracers; objects that do, and functions (which JAX caches programs by), are held by weak reference.
    """
    values = _Values()
    frames = [_take(frame, values) for frame in _frames(values)]
    return frames, values.tracers


class _Values:
    """The tracers that were met, each once.

    Attributes:
        tracers: those to send.
        encloses: whether variables of the frame at hand may be tracers of an enclosing trace.
    """

    def __init__(self) -> None:
        self.tracers: list[Any] = []
        self.encloses = True
        self._places: dict[int, int] = {}

    def restore_tracer(self, tracer: Any) -> Restore:
        why_not = self._why_not(tracer)
        if why_not is not None:
            missing = Unavailable(f"{why_not}, {_aval(tracer)}")
            return lambda values: missing
        place = self._places.setdefault(id(tracer), len(self.tracers))
        if place == len(self.tracers):
            self.tracers.append(tracer)
        return lambda values: values[place]

    def _why_not(self, tracer: Any) -> str | None:
        where = compat.trace_of(tracer)
        if where is None:
            return "tracer of another trace, an inner one or one that is over"
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
    """The user's frames, innermost first. Says in `values.encloses` what is known of the one that it yields."""
    frame: FrameType | None = sys._getframe(1)
    entry: FrameType | None = None  # the user's frame that code which is not the user's called last
    entered = False
    while frame is not None:
        if not is_user_frame(frame, runs_it=False):
            entered = entry is not None
            values.encloses = values.encloses and not (entered and compat.is_frame_of_jit(frame))
        else:
            if entered and entry is not None:
                # JAX caches the jaxpr of a function and reuses it, also under another outer trace. The body of a loop
                # or branch that is defined in its enclosing function is a new function each time and is used once. (A
                # body with a jit may be kept by the user for the next time.)
                values.encloses = values.encloses and _defined_in(entry.f_code, frame)
                entered = False
            entry = frame
            yield frame
        frame = frame.f_back


def _defined_in(code: CodeType, frame: FrameType) -> bool:
    # In this function, or in one of the user's that called it without anybody between.
    caller: FrameType | None = frame
    while caller is not None and is_user_frame(caller, runs_it=False):
        if _contains(caller.f_code, code):
            # A module's code runs once: its functions are the same ones each time.
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
        # The variables of code that `exec` runs. They may hold this very program: only what the code names is kept.
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
    # Not a dict whose keys have no order, a container in itself, a user's own pytree that fails.
    with contextlib.suppress(Exception):
        leaves, tree = jax.tree.flatten(value)
    kept = [_keep_leaf(leaf, values) for leaf in leaves]
    if all(restore is None for restore in kept):
        return lambda arrays: value
    if tree is None or jax.tree_util.treedef_is_leaf(tree):
        assert kept[0] is not None
        return kept[0]
    # Without `value` itself: it holds the tracers.
    fixed = [leaf if restore is None else None for leaf, restore in zip(leaves, kept, strict=True)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        return tree.unflatten(
            [leaf if restore is None else restore(arrays) for leaf, restore in zip(fixed, kept, strict=True)]
        )

    return rebuild


def _keep_leaf(leaf: Any, values: _Values) -> Restore | None:
    """How a leaf comes back; None if it is simply kept."""
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
    except Exception as error:  # a user's own pytree that does not take arrays
        return Unavailable(f"a container that could not be put together again, {error!r}")


def _aval(tracer: Any) -> str:
    try:
        return str(jax.typeof(tracer))
    except Exception:
        return type(tracer).__name__
