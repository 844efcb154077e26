"""Checks the functions that users pass to be called on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def refuse_async(func: Callable[..., Any], what: str, place: Any = "") -> None:
    """Refuses a function whose calls make coroutines or generators, which no thread of ours would run.

    Args:
        func: the user's function.
        what: who takes it, for the message.
        place: the user's line, if it is known.

    Raises:
        TypeError: `func` is such a function.
    """
    at = f", at {place}" if place else ""
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
