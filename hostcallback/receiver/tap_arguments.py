"""What users pass to taps: the functions that are called on the host, names, and the globs that match names."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol


class SupportsWrite(Protocol):
    """Protocol of `output_stream` of id_print."""

    def write(self, text: str, /) -> Any:
        """Writes the text."""


def base_name(name: str) -> str:
    """Returns a name without the line: `print` of `print@train_step:42`."""
    return name.partition("@")[0]


def matches(name: str, pattern: str) -> bool:
    """Whether a glob (`*`, `?`, `[seq]`, case-sensitive) matches a tap's name.

    A glob without `@` also matches the part before it: `print` matches `print@train_step:42`.
    """
    return fnmatch.fnmatchcase(name, pattern) or (
        "@" in name and "@" not in pattern and fnmatch.fnmatchcase(base_name(name), pattern)
    )


_NOT_A_CALL = (
    inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR
)


def refuse_async(func: Callable[..., Any], what: str, place: Callable[[], Any] | None = None) -> None:
    """Refuses a function whose calls make coroutines or generators, which no thread of ours would run.

    Args:
        func: the user's function.
        what: who takes it, for the message.
        place: returns the user's line, if it is known.

    Raises:
        TypeError: `func` is such a function.
    """
    # Most functions, in a fraction of the time; a function that was marked as a coroutine has that in its `__dict__`.
    if type(func) is FunctionType and not func.__code__.co_flags & _NOT_A_CALL and not func.__dict__:
        return
    at = f", at {place()}" if place else ""
    for candidate in (func, type(func).__dict__.get("__call__")):
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            raise TypeError(
                f"{what} got the async function {func!r}, and a receiver thread awaits nothing: pass a function that "
                "hands the work to your event loop, such as lambda value: "
                f"asyncio.run_coroutine_threadsafe(function(value), loop){at}"
            )
        if inspect.isgeneratorfunction(candidate):
            raise TypeError(
                f"{what} got the generator function {func!r}, whose body no call would run: pass a function without "
                f"yield{at}"
            )
