"""Names and source lines of traced functions and equations, the frames they were traced in, and users' tracebacks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jax._src import (
    api_util as _api_util,  # fun_sourceinfo
    source_info_util as _source_info_util,  # user_context, is_user_filename
    traceback_util as _traceback_util,  # register_exclusion, api_boundary
)

F = TypeVar("F", bound=Callable[..., Any])

# The frames of this package are hidden from users' tracebacks, as JAX hides its own (0.8 to 0.12).
_traceback_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def hide_frames(function: F) -> F:
    """Decorates a public function: tracebacks of its exceptions end at the user's line.

    `JAX_TRACEBACK_FILTERING=off`, a setting of JAX, keeps all frames.
    """
    return _traceback_util.api_boundary(function)


def traced_function(closed: Any) -> str | None:
    """Name and source line of the function that a program was traced from, in the form of `source_of`."""
    name = getattr(closed.jaxpr.debug_info, "func_src_info", None)
    return None if name is None else str(name)


def source_of(function: Any) -> str:
    """Name and source line of a function, jitted or not, as JAX's traces note them (0.8 to 0.12)."""
    wrapped = inspect.unwrap(function)
    # Until 0.12, JAX does not look into a partial: without this, the name is not the one that the trace has.
    while isinstance(wrapped, functools.partial):
        wrapped = inspect.unwrap(wrapped.func)
    return str(_api_util.fun_sourceinfo(wrapped))


def is_jaxs_own(function: Any) -> bool:
    """Whether JAX defines the function itself, in one of its private modules (0.8 to 0.12)."""
    return (getattr(function, "__module__", None) or "").startswith("jax._src.")


@contextlib.contextmanager
def equation_context(equation: Any) -> Iterator[None]:
    """What an equation was traced in (name stack, source line, `compute_on` and such), as `core.eval_jaxpr` has it."""
    name_stack: Any = _source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        _source_info_util.user_context(equation.source_info.traceback, name_stack=name_stack),
        equation.ctx.manager,
    ):
        yield


def no_equation_context() -> Any:
    """Undoes `equation_context` while other code of the user's is traced, whose equations have their own lines."""
    return _source_info_util.user_context(None, name_stack=_source_info_util.new_name_stack())


def equation_frames(equation: Any) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames that an equation was traced in, innermost first, without JAX's own.

    Only those of the innermost function that JAX traced, and none if that is JAX's own: JAX keeps the traced function,
    and another line may have called it then. From 0.9 on the equation has no other frames; before, without the test
    for `trace_to_jaxpr_dynamic`, the line could be wrong.
    """
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.function_name.endswith("trace_to_jaxpr_dynamic"):
            return
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name


def evaluated_frames() -> Iterator[tuple[str, int, str]]:
    """As `equation_frames`, of the equation that the calling thread evaluates; none where it calls a user's function.

    `eval_jaxpr` and JAX's rules put the equation's traceback where new equations get theirs from (0.8 to 0.12).
    """
    traceback = getattr(_source_info_util._source_info_context.context, "traceback", None)
    for frame in traceback.frames if traceback else ():
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name
