"""Which line of the user's code a tap was written on."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from jax.extend import source_info_util

# equinox and flax wrap functions, and a tap is one: `equinox.filter_vmap(functools.partial(id_tap, log))(x)`.
_NOT_THE_USER = ("hostcallback", "jax", "jaxlib", "contextlib", "functools", "equinox", "flax")

# JAX then names the user's line too, for what a tap returned: in errors about tracers that escaped, in compiled
# programs and in profiles.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of user code.

    Attributes:
        file: the file's path as Python knows it.
        line: 1-based.
        function: the enclosing function's qualified name.
        module: the module's name; with the line it names the place alike on every machine.
    """

    file: str
    line: int
    function: str
    module: str

    def __str__(self) -> str:
        """`file:line (function)`."""
        return f"{self.file}:{self.line} ({self.function})"


def user_source_line() -> SourceLine:
    """The innermost frame of the calling thread that belongs neither to this package nor to what wraps functions."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _NOT_THE_USER:
            break
        frame = frame.f_back
    code = frame.f_code
    return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname, frame.f_globals.get("__name__", ""))
