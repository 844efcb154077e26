"""Source lines and frames of equations, names of inputs, and users' tracebacks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import jax
from jax._src import (
    config as _config,  # config_ext.unset, traceback_filtering
    source_info_util as _source_info_util,  # user_context, is_user_filename, register_exclusion
    traceback_util as _traceback_util,  # register_exclusion, api_boundary, filter_traceback
)

from hostcallback._jax_compat.types import ClosedJaxpr, JaxprEqn
from hostcallback.receiver.public_names import users_frames

F = TypeVar("F", bound=Callable[..., Any])

# The frames of this package are hidden from users' tracebacks, as JAX hides its own (0.8 to 0.12).
_traceback_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def exclude_from_source_lines(folder: str) -> None:
    """Excludes the files of a folder where JAX looks for the user's line, as `jax.extend.source_info_util` does."""
    _source_info_util.register_exclusion(folder)


def filtered(function: F) -> tuple[F, tuple[type[BaseException], ...]]:
    """The function as JAX's public ones are, and the exceptions of it that `end_at_users_line` is for.

    In IPython JAX leaves the frames to that, which does not hide those of groups.
    """
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    is_shell = get_ipython is not None and get_ipython() is not None
    kinds = (KeyboardInterrupt, BaseExceptionGroup) if is_shell else (Exception, KeyboardInterrupt)
    return _traceback_util.api_boundary(function), kinds


def end_at_users_line(error: BaseException) -> None:
    """Has the traceback of an exception end at the user's line.

    `JAX_TRACEBACK_FILTERING=off`, a setting of JAX, keeps all frames. JAX (0.8 to 0.12) leaves those of a
    KeyboardInterrupt.
    """
    if _config.traceback_filtering.value != "off":
        trace = error.__traceback__
        trace = users_frames(trace) if isinstance(error, KeyboardInterrupt) else trace
        error.with_traceback(trace and _traceback_util.filter_traceback(trace))
        if isinstance(error, BaseExceptionGroup) and hasattr(error, "__notes__"):
            # It would stand between a report and its members, and speaks of "the following exception".
            error.__notes__ = [
                note for note in error.__notes__ if "JAX has removed its internal frames" not in note
            ]


@contextlib.contextmanager
def equation_context(equation: JaxprEqn) -> Iterator[None]:
    """What an equation was traced in (name stack, source line, `compute_on` and such), as `core.eval_jaxpr` has it."""
    name_stack: Any = _source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        _source_info_util.user_context(equation.source_info.traceback, name_stack=name_stack),
        equation.ctx.manager,
    ):
        yield


def no_equation_context() -> Any:
    """Suspends `equation_context` while other user code is traced: its equations have their own source lines."""
    return _source_info_util.user_context(None, name_stack=_source_info_util.new_name_stack())


def equation_frames(equation: JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames that an equation was traced in, innermost first, without JAX's own.

    Only those of the innermost function that JAX traced, and none if that is JAX's own: JAX keeps the traced function,
    and another line may have called it then. From 0.9 on the equation has no other frames; before, without the test
    for `trace_to_jaxpr_dynamic`, the line could be wrong.
    """
    traceback: Any = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.function_name.endswith("trace_to_jaxpr_dynamic"):
            return
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name


def equation_origin(equation: JaxprEqn) -> tuple[Any, ...]:
    """Where an equation was traced, to the instruction: equal for an operation and for what its transpose makes of it.

    Empty if that is not known. `raw_frames` has the code objects and the offsets of their instructions (0.8 to 0.12);
    `equation_frames` has lines only.
    """
    traceback: Any = equation.source_info.traceback
    origin = []
    for code, offset in zip(*(traceback.raw_frames() if traceback else ((), ())), strict=True):
        if code.co_name == "trace_to_jaxpr_dynamic":
            break
        if _source_info_util.is_user_filename(code.co_filename):
            origin.append((code, offset))
    return tuple(origin)


def evaluated_frames() -> Iterator[tuple[str, int, str]]:
    """As `equation_frames`, for the equation that the calling thread evaluates; empty while it calls a user's function.

    `eval_jaxpr` and JAX's rules put the equation's traceback where new equations get theirs from (0.8 to 0.12).
    """
    traceback = getattr(_source_info_util._source_info_context.context, "traceback", None)
    for frame in traceback.frames if traceback else ():
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name


def set_user_context(context: Any, value: Any) -> None:
    """Sets the value of a `jax.make_user_context` for all threads that have not set it (`set_global` is newer)."""
    context._obj.set_global(value)


def user_context_setters(context: Any) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Returns the functions that set and unset a `jax.make_user_context` for the calling thread (0.8 to 0.12)."""
    set_local = context._obj.set_local
    return set_local, functools.partial(set_local, _config.config_ext.unset)


# ---- The inputs of a program that is being lowered -------------------------------------------------------------------

_PART = re.compile(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.(\w+)|^(\w+)")
_FRAMEWORKS = ("equinox.", "flax.")
_VALUE = ("value", "raw_value")  # the attribute of a flax nnx variable that has its array


def input_paths(closed: ClosedJaxpr) -> Sequence[tuple[str, ...]]:
    """The path of each input of a program in its function's arguments, such as `("params", "Dense_0", "kernel")`.

    Called where JAX lowers the program. The names are those of the jitted function's arguments. A framework's jit
    passes other arguments to JAX: then the arrays are looked for in the arguments of that framework's function, which
    is on the stack. JAX has the arrays there as `args_flat`, and the numbers of those that the program uses as
    `kept_var_idx` (0.8 to 0.12); without these, such inputs have the names of the framework's own function.
    """
    names = closed.jaxpr.debug_info.safe_arg_names(len(closed.jaxpr.invars))
    paths = [tuple(next(filter(None, part), "") for part in _PART.findall(name or "")) for name in names]
    frame: FrameType | None = sys._getframe(1)
    flat, kept = None, None
    users: dict[int, tuple[str, ...]] = {}
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("jax."):
            if function == "lower_sharding_computation" and kept is None:
                kept = frame.f_locals.get("kept_var_idx")
            if flat is None and "args_flat" in frame.f_locals:
                flat = frame.f_locals["args_flat"]
        elif module.startswith(_FRAMEWORKS):
            users.update(_paths_of_arguments(frame))
        elif flat is not None:
            break  # the user's code
        frame = frame.f_back
    if not users or flat is None or kept is None:
        return paths
    arrays = [flat[i] for i in sorted(kept) if i < len(flat)]
    if len(arrays) != len(paths):
        return paths
    return [users.get(id(array), path) for array, path in zip(arrays, paths, strict=True)]


def _paths_of_arguments(frame: FrameType) -> dict[int, tuple[str, ...]]:
    # By the identity of an array among the arguments of a framework's function, its path.
    args, kwargs = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        return {}
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    except Exception:  # the framework's own objects
        return {}
    names = _parameters(frame.f_locals.get("self"))
    found = {}
    for path, leaf in leaves:
        parts = tuple(_key(entry) for entry in path[2:])
        if parts and parts[-1] in _VALUE:
            parts = parts[:-1]
        number = getattr(path[1], "idx", None)
        name = names[number] if number is not None and number < len(names) else _key(path[1])
        found[id(leaf)] = (name, *parts)
    return found


def _parameters(function: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
