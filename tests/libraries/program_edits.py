"""What a feature edits in the programs of the matrix: nothing, until one is on.

A program calls `edits.wrap` on its jitted step, `edits.log` in code that JAX traces, and `edits.scan` for its loop,
where a user of a feature would write it. The tool `nothing_changed` sets them for a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax


class Edits:
    """The places of a program that a user of a feature edits."""

    def __init__(self) -> None:
        """No feature is on."""
        self.wrapped: Callable[[Any], Any] = lambda step: step
        self.logged: Callable[[dict[str, Any]], None] = lambda values: None
        self.scanned: Callable[..., Any] = lax.scan
        self.observed = ("dot_general", "tanh", "exp", "log", "sin", "div", "reduce_sum", "sqrt")
        self.fails = False
        self.calls = 0
        self.loops = 0

    def wrap(self, step: Any) -> Any:
        """Takes a jitted function."""
        return self.wrapped(step)

    def log(self, **values: Any) -> None:
        """Takes scalars, traced; of the variant that fails, its error."""
        self.calls += 1
        if self.fails:
            raise UsersError("the program's own")
        self.logged(values)

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """As `lax.scan`."""
        self.loops += 1
        return self.scanned(*args, **kwargs)


class UsersError(LookupError):
    """An error of the program itself."""


edits = Edits()
