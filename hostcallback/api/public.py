"""Decorates public functions: their frames are hidden from tracebacks, and wrong arguments get a cure."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver.sinks.tap import CONTEXT, accepted_keywords
from hostcallback.tracing.source_line import user_source_line

F = TypeVar("F", bound=Callable[..., Any])

_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def public(function: F) -> F:
    """Returns the function with hidden frames and checked arguments; the signature stays."""

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
    """Raises TypeError for a compiled function: its program cannot get taps any more.

    Raises:
        TypeError: it was compiled ahead of time.
    """
    if isinstance(function, jax.stages.Compiled):
        raise TypeError(
            f"hcb.{what} got a function that was compiled ahead of time, which keeps its program: compile it in a "
            f"block, with hcb.{what}(...): compiled = jax.jit(f).lower(x).compile(), at {user_source_line()}"
        )


def check_arguments(
    what: str,
    func: Callable[..., Any],
    kwargs: Mapping[str, Any],
    options: list[str],
) -> None:
    """Checks that a tap function takes the arguments that it is going to be called with: one value and `kwargs`.

    Args:
        what: who calls it, for the message.
        func: the user's function. One without a signature that Python knows is not checked.
        kwargs: keyword arguments of the call.
        options: the names of options of `what`, one of which the user may have meant.

    Raises:
        TypeError: it does not take them.
    """
    if not kwargs and _takes_one_value(func):
        return
    try:
        signature = inspect.signature(func, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    keywords = dict.fromkeys((*accepted_keywords(func, CONTEXT), *kwargs))
    try:
        signature.bind(None, **keywords)
    except TypeError as error:
        raise TypeError(
            f"{_refusal(what, func, kwargs, options, parameters, error)}, at {user_source_line()}"
        ) from None


def _takes_one_value(func: Callable[..., Any]) -> bool:
    # Most functions, in a fraction of the time of a signature.
    code = getattr(func, "__code__", None)
    if type(func) is not FunctionType or code is None or code.co_kwonlyargcount or not code.co_argcount:
        return False
    return int(code.co_argcount) - len(func.__defaults__ or ()) <= 1


def _refusal(
    what: str,
    func: Any,
    kwargs: Mapping[str, Any],
    options: list[str],
    parameters: Mapping[str, Any],
    error: TypeError,
) -> str:
    called = getattr(func, "__name__", func)
    variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in () if variadic else kwargs:
        if name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            near = difflib.get_close_matches(name, options, n=1)
            meant = f"did you mean {near[0]}=?" if near else f"give it a parameter {name!r}"
            return f"{what} passes {name}={kwargs[name]!r} to {called!s}, which does not take it: {meant}"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters.values() if p.kind in positional and p.name not in kwargs]
    if not names:
        cure = "give it a parameter for the value"
    elif len(names) > 1:
        cure = f"a tuple or list is taken apart by lambda value: {_name_of(func)}(*value)"
    else:
        cure = "pass its other arguments as keyword arguments, or give them defaults"
    return f"{what} calls {called!s} with one value, the tapped pytree, and it does not take that ({error}): {cure}"


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", ""))
    return name if name.isidentifier() else "function"
