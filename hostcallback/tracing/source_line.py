"""Where a tap was written: the line of the user's code, and the named scopes around it."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

from hostcallback import _jax_compat as compat
from hostcallback.receiver.failures.call_site import CallSite, Frame
from hostcallback.receiver.public_names import UNEXPECTED, suggestion

MAX_FRAMES = 64

# equinox and flax wrap functions, and a tap is a function: `equinox.filter_vmap(functools.partial(id_tap, log))(x)`.
_NOT_THE_USER = ("hostcallback", "jax", "jaxlib", "contextlib", "functools", "equinox", "flax")

# Packages that run scripts, notebooks and tests: their frames say nothing about the user's program.
_RUNS_THE_USER = (
    "IPython", "_pytest", "asyncio", "bdb", "code", "concurrent", "ipykernel", "ipykernel_launcher", "pdb", "pluggy",
    "pytest", "runpy", "threading", "tornado", "traitlets", "unittest",
)  # fmt: skip

# Functions that call their first argument; equinox has `filter_vmap` and the like.
_WRAP = {
    prefix + name
    for prefix in ("", "filter_")
    for name in (
        "checkpoint",
        "grad",
        "jit",
        "jvp",
        "linearize",
        "partial",
        "remat",
        "value_and_grad",
        "vjp",
        "vmap",
    )
}

# With this exclusion, JAX names the user's line for the results of a tap: in errors about escaped tracers, in compiled
# programs and in profiles.
compat.exclude_from_source_lines(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of user code.

    Attributes:
        file: the file's path as Python knows it.
        line: 1-based.
        function: the enclosing function's qualified name.
        module: the module's name, which is equal on every machine, unlike the path.
    """

    file: str
    line: int
    function: str
    module: str

    def __str__(self) -> str:
        """`file:line (function)`."""
        return f"{self.file}:{self.line} ({self.function})"


def place_name(what: str, line: SourceLine | None = None) -> str:
    """Returns the name of an unnamed tap, by default on the calling thread's line: `print@train_step:42`.

    The file's name stands for a function without a name: a lambda, or a module.
    """
    line = line or user_source_line()
    named = [part for part in line.function.split(".") if not part.startswith("<")]
    return f"{what}@{named[-1] if named else os.path.basename(line.file)}:{line.line}"


def is_user_frame(frame: FrameType, *, runs_it: bool = True) -> bool:
    """Whether a frame belongs neither to this package nor to a library that wraps functions.

    With `runs_it=False`, frames of packages that run user code (pytest, IPython) do not count as the user's either.
    """
    name = frame.f_globals.get("__name__", "")
    if name == "__main__":  # `python -m ipykernel_launcher`
        name = getattr(frame.f_globals.get("__spec__"), "name", name)
    package = name.partition(".")[0]
    return package not in _NOT_THE_USER and (runs_it or package not in _RUNS_THE_USER)


def user_source_line() -> SourceLine:
    """Returns the line of the calling thread's innermost user frame (see `is_user_frame`)."""
    frame = _user_frame()
    code = frame.f_code
    return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname, frame.f_globals.get("__name__", ""))


def user_stacklevel() -> int:
    """The `stacklevel=` with which a warning of the calling function points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_frame(frame):
        frame, level = frame.f_back, level + 1
    return level


class UsedName:
    """A public function as the user's line calls it, `hcb.tap` or `hcb.id_tap`. A text that takes it looks there."""

    def __init__(self, name: str) -> None:
        """`name` is its `__name__`."""
        self._names = ("tap", name) if name == "id_tap" else (name,)

    def __str__(self) -> str:
        """The name; the first one if the line is not known."""
        used = _user_frame().f_code.co_names
        return f"hcb.{next((name for name in self._names if name in used), self._names[0])}"


def _user_frame() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_user_frame(frame):
        frame = frame.f_back
    return frame


def user_place() -> CallSite:
    """Returns the user's frames of the calling thread, and the range of the call in the innermost frame's source."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < MAX_FRAMES:
        if is_user_frame(frame, runs_it=False):
            frames.append(frame)
        frame = frame.f_back
    stack = tuple(Frame(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_qualname) for f in frames)
    return CallSite(stack, _span(frames[0].f_code, frames[0].f_lasti) if frames else None)


def _span(code: CodeType, offset: int) -> tuple[int, int, int, int] | None:
    # The offset, as `f_lasti`, counts bytes, and an instruction has two. co_positions() has an entry per instruction.
    positions = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    if positions is None:
        return None
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return None
    return first, last, start, end


@functools.lru_cache(maxsize=4096)
def called_name(code: CodeType, offset: int) -> tuple[str, ...]:
    """Returns the name that an instruction calls, from its source: `("linear",)` for `self.linear(x)`.

    An index is one more part: `self.layers[0](x)`. What `jax.vmap` and the like call is their first argument.

    Returns:
        The parts; none if the instruction is no call, is not the user's, or its source is not known.
    """
    span = _span(code, offset)
    if span is None or _is_not_the_user(code.co_filename):
        return ()
    first, last, start, end = span  # the columns count bytes
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return ()
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        node = ast.parse(b"(%b)" % b"".join(lines), mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed
        return ()
    return _name(node.func) if isinstance(node, ast.Call) else ()


def _name(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return (name,)
        case ast.Subscript(value=value, slice=ast.Constant(value=index)):
            return (*_name(value), str(index))
        case ast.Subscript(value=value):
            return _name(value)
        case ast.Call(func=function, args=[wrapped, *_]) if (
            _name(function)[-1:] and _name(function)[-1] in _WRAP
        ):
            return _name(wrapped)
    return ()


def first_user_line(frames: Iterable[tuple[str, int, str]]) -> SourceLine | None:
    """Returns the innermost user line of frames that JAX recorded; None if none of them is the user's.

    Args:
        frames: (file, line, function) of each frame, innermost first.
    """
    for file, line, function in frames:
        if not _is_not_the_user(file):
            return SourceLine(file, line, function, _module_of(file))
    return None


def _is_not_the_user(file: str) -> bool:
    return _module_of(file).partition(".")[0] in _NOT_THE_USER


@functools.lru_cache(maxsize=1024)
def _module_of(file: str) -> str:
    names = [name for name, m in list(sys.modules.items()) if getattr(m, "__file__", None) == file]
    return min(names, key=len, default="")


MARK = "hostcallback-"
"""How the scopes begin with which X-ray marks equations."""

OWN = f"{MARK}own"
"""The scope of the equations that X-ray adds."""

PACED = f"{MARK}paced"
"""The scope of the two nested loops that a loop with a bar is; with a number, of the inner one: the value that it
carries at that place is the number of the step."""

SPAN = f"{MARK}span"
"""The scope around that of an `hcb.span`."""

_MARKS = re.compile(rf"{MARK}\d+")
_PACED = re.compile(rf"{PACED}(\d*)")
_TRANSFORM = re.compile(r"\b[a-z_]+\((?=[^()]*\)|[a-z_]+\()|\)")
_RECOMPUTED = "rematted_computation"
_NOT_SCOPES = {_RECOMPUTED, "checkpoint"}


def mark(number: int) -> str:
    """Returns the name of a scope that marks equations."""
    return f"{MARK}{number}"


def marks_in(stack: str) -> Sequence[str]:
    """Returns the marks in a name stack, outermost first."""
    return _MARKS.findall(stack)


def paced(stack: str) -> str | None:
    """Returns the digits behind `PACED` in a name stack; None for other loops."""
    found = _PACED.search(stack)
    return found and found[1]


def is_own(stack: str) -> bool:
    """Whether the equation with that name stack was added by X-ray."""
    return OWN in stack


def is_backward(stack: str) -> bool:
    """Whether an equation with that name stack is part of a backward pass."""
    return "transpose(" in stack


def is_recomputed(stack: str) -> bool:
    """Whether `jax.checkpoint` put the equation into a backward pass to compute a value a second time."""
    return _RECOMPUTED in stack


def scope_of(stack: str, *, is_twice: bool = False) -> tuple[str, ...]:
    """Returns the named scopes in a name stack, without the names of transformations and our marks.

    Args:
        stack: the name stack of an equation.
        is_twice: whether the equation is a checkpoint of a backward pass that is told of by an equation around it only.
    """
    return tuple(part for part in _scopes(stack, is_twice) if part != SPAN)


def spans_of(stack: str, *, is_twice: bool = False) -> tuple[int, ...]:
    """Returns which of the scopes in a name stack (`scope_of`) are spans: for each the number of scopes up to it."""
    found = [i for i, part in enumerate(_scopes(stack, is_twice)) if part == SPAN]
    return tuple(i - number + 1 for number, i in enumerate(found))


def _scopes(stack: str, is_twice: bool) -> list[str]:
    parts = _TRANSFORM.sub("", stack).split("/")
    if is_backward(stack):
        # The backward pass of a jitted function and that of a checkpoint have the scopes around the gradient twice:
        # `step/transpose(step)/jvp(layer)` and `step/transpose(jvp(step))/jvp(layer)`.
        around = stack[: stack.index("transpose(")].count("/")
        is_repeated = parts[:around] == parts[around : 2 * around]
        if is_repeated and any("jvp(" in part for part in stack.split("/")[2 * around :][:1]):
            parts = parts[around:]
    parts = [p for p in parts if p and p not in _NOT_SCOPES and (p == SPAN or not p.startswith(MARK))]
    half = len(parts) // 2
    # The backward pass of a checkpoint has its own scopes twice, too: `transpose(jvp(layer))/jvp(layer)`, and
    # `layer/layer` in the backward pass of a jitted function.
    is_twice |= is_backward(stack)
    return parts[half:] if is_twice and half and parts[:half] == parts[half:] else parts


F = TypeVar("F", bound=Callable[..., Any])


def hide_frames(function: F) -> F:
    """Decorates a public function: tracebacks of its exceptions end at the user's line."""
    filtered, kinds = compat.filtered(function)
    is_finalizing = sys.is_finalizing  # kept here, as for `public_names.hide_frames`

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return filtered(*args, **kwargs)
        except kinds as error:
            if is_finalizing():
                return None
            compat.end_at_users_line(error)
            raise

    return cast(F, call)


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
            name, *rest = text.partition("()")
            raise TypeError(
                f"{UsedName(name)}{''.join(rest)}{_cure(function, text, args)}, at {user_source_line()}"
            ) from None

    return hide_frames(cast(F, call))


def _cure(function: Callable[..., Any], error: str, args: tuple[Any, ...]) -> str:
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    unexpected = UNEXPECTED.search(error)
    if unexpected and function.__name__ == "metrics" and not args:
        return f": its values are a dict, hcb.metrics({{{unexpected[1]!r}: ...}}, step=...)"
    if unexpected:
        return f": {suggestion(unexpected[1], options)}"
    if len(args) == 1 and isinstance(args[0], FunctionType) and "0 positional" in error:
        return f": it is no decorator, with hcb.{function.__name__}(): {args[0].__name__}(...)"
    if not parameters:
        return f": call hcb.{function.__name__}()"
    keyword_only = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if (
        keyword_only
        and len(keyword_only) < len(parameters)
        and " positional argument" in error
        and "given" in error
    ):
        positional = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        before = ", ".join(name for name in positional if name not in keyword_only)
        return (
            f". Its options are keyword arguments: hcb.{function.__name__}({before}, {keyword_only[0]}=...)"
        )
    if args and all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters):
        return f". Its options are keyword arguments: {function.__name__}({options[0]}={args[0]!r})"
    return ""
