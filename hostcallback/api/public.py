"""Decorates public functions: their frames are hidden from tracebacks, and wrong arguments get a cure."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from hostcallback import _jax_compat as compat
from hostcallback.tracing.source_line import user_source_line

F = TypeVar("F", bound=Callable[..., Any])

_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def public(function: F) -> F:
    """Returns the function with the same signature; see above."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            traceback = error.__traceback__
            if traceback is None or traceback.tb_next is not None:  # the function has begun
                raise
            # Python 3.13 and later append a suggestion to it.
            text = str(error).partition(". Did you mean ")[0]
            raise TypeError(f"hcb.{text}{_cure(function, text, args)}, at {user_source_line()}") from None

    return compat.hide_frames(cast(F, call))


def _cure(function: Callable[..., Any], error: str, args: tuple[Any, ...]) -> str:
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    unexpected = _UNEXPECTED.search(error)
    if unexpected:
        return f": {suggestion(unexpected[1], options)}"
    if args and all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters):
        return f". Its options are keyword arguments: {function.__name__}({options[0]}={args[0]!r})"
    return ""


def suggestion(name: str, options: list[str]) -> str:
    """Returns what the user may have meant by an option that does not exist."""
    near = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {near[0]}=?" if near else f"its options are {', '.join(options)}"


def refuse_compiled(what: str, function: Any) -> None:
    """Checks that programs of a function can get taps.

    Raises:
        TypeError: it was compiled ahead of time.
    """
    if isinstance(function, jax.stages.Compiled):
        raise TypeError(
            f"hcb.{what} got a function that was compiled ahead of time, which keeps its program: compile it in a "
            f"block, with hcb.{what}(...): compiled = jax.jit(f).lower(x).compile(), at {user_source_line()}"
        )


def check_keywords(what: str, func: Callable[..., Any], kwargs: dict[str, Any], options: list[str]) -> None:
    """Checks that a tap function takes the keyword arguments that it is going to be called with.

    Raises:
        TypeError: it does not take one.
    """
    if not kwargs:
        return
    try:
        parameters = inspect.signature(func, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in kwargs:
        if name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            near = difflib.get_close_matches(name, options, n=1)
            meant = f"did you mean {near[0]}=?" if near else f"give it a parameter {name!r}"
            raise TypeError(
                f"{what} passes {name}={kwargs[name]!r} to {getattr(func, '__name__', func)!s}, which does not take "
                f"it: {meant}, at {user_source_line()}"
            )
