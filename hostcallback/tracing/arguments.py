"""Checks what users pass to public functions: arguments, format strings, keyword arguments of taps.

This is done when a function is called or traced, because the user's line is known then.
"""

from __future__ import annotations

import difflib
import inspect
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.sinks.tap import CONTEXT, accepted_keywords
from hostcallback.tracing import leaves, tap_spec
from hostcallback.tracing.source_line import user_source_line


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


def refuse_generators(what: str, function: Callable[..., Any]) -> None:
    """Refuses a function whose body runs after its call has returned.

    Raises:
        TypeError: it is a generator function, or async.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        kind = "async function" if is_async else "generator function"
        raise TypeError(
            f"{what} got the {kind} {tap_spec.callable_name(function)}, whose body runs after its call has returned: "
            f"wrap a function that it calls, at {user_source_line()}"
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
    if _takes_one_value(func, kwargs):
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


def _takes_one_value(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    # Most functions, in a fraction of the time of a signature. False if that must tell.
    code = getattr(func, "__code__", None)
    if type(func) is not FunctionType or code is None or code.co_kwonlyargcount or not code.co_argcount:
        return False
    names = code.co_varnames[: code.co_argcount]
    required = names[1 : code.co_argcount - len(func.__defaults__ or ())]
    return set(required) <= set(kwargs) <= set(names[max(1, code.co_posonlyargcount) :])


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
        name = _name_of(func)
        cure = f"a tuple or list is taken apart by lambda value: {name}(*value), a dict by {name}(**value)"
    else:
        cure = "pass its other arguments as keyword arguments, or give them defaults"
    return f"{what} calls {called!s} with one value, the tapped pytree, and it does not take that ({error}): {cure}"


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", ""))
    return name if name.isidentifier() else "function"


# ---- Format strings, and keyword arguments of taps -------------------------------------------------------------------


def placeholders(fmt: str) -> Iterator[str]:
    """Yields the fields of a format string as written, without format specifications: `x.shape`, `x!r`."""
    for _, name, spec, conversion in string.Formatter().parse(fmt):
        if name is not None:
            yield f"{name}!{conversion}" if conversion else name
            yield from placeholders(spec or "")


def named_fields(fmt: str) -> set[str]:
    """The names of the keyword arguments that a format string refers to; none if it is malformed."""
    try:
        return {re.split(r"[.\[!]", field, maxsplit=1)[0] for field in placeholders(fmt)}
    except ValueError:
        return set()


def with_scalars(
    fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a format string, with scalars for objects that stand for them, such as `nnx.Variable`.

    An argument of which the format string takes an attribute, an item or the repr, stays as it is.
    """
    try:
        taken = {
            re.split(r"[.\[!]", field, maxsplit=1)[0] for field in placeholders(fmt) if _ACCESS.search(field)
        }
    except ValueError:  # it is malformed, which `check_format` says
        taken = {""}
    keeps_all = "" in taken
    positional = [
        arg if keeps_all or str(place) in taken else leaves.scalar_of(arg) for place, arg in enumerate(args)
    ]
    named = {key: arg if key in taken else leaves.scalar_of(arg) for key, arg in kwargs.items()}
    return tuple(positional), named


_ACCESS = re.compile(r"[.\[!]")


def check_format(what: str, fmt: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that each placeholder has an argument and each argument a placeholder, as `jax.debug.print` does.

    A keyword argument called `step` needs no placeholder: it is the step of the message.

    Args:
        what: name of the calling function, for errors.
        fmt: the format string.
        args: its positional arguments; may be traced.
        kwargs: its keyword arguments; may be traced.

    Raises:
        TypeError: a value is an array or a container, and its format is for a scalar; or `step` has no placeholder and
            is not an integer.
        ValueError: an argument is not used, the format string is malformed or does not fit the dtype of a value, or it
            is an f-string with a traced value.
        IndexError: a positional argument is missing.
        KeyError: a keyword argument is missing.
    """
    checker = _Checker(what, fmt, str(user_source_line()))
    _refuse_traced_text(what, fmt, checker.source_line)
    try:
        list(placeholders(fmt))
    except ValueError as error:
        raise ValueError(
            f"the format string {fmt!r} of {what} is malformed: {error}. A placeholder is {{}} or {{name}}; write "
            f"{{{{ and }}}} for braces, at {checker.source_line}"
        ) from None
    if STEP in kwargs and STEP not in named_fields(fmt):
        tap_spec.check_step(what, kwargs[STEP])
        kwargs = {name: value for name, value in kwargs.items() if name != STEP}
    try:
        checker.vformat(fmt, args, kwargs)
    except Exception as error:
        if checker.source_line not in str(error):
            error.add_note(f"{what} was called at {checker.source_line}")
        raise error.with_traceback(None) from None  # the frames of `string` tell users nothing


def _refuse_traced_text(what: str, fmt: str, source_line: str) -> None:
    traced = _TRACED.search(fmt)
    if traced:
        raise ValueError(
            f"the text given to {what} contains {traced[0]!r}..., what a traced value looks like: it was made by an "
            f"f-string, str() or +, before the value is known. Pass the value: {what}('x is {{x}}', x=x), at "
            f"{source_line}"
        )


_TRACED = re.compile(r"\b(?:Traced|[A-Za-z]*Tracer)[<(][^>)]{0,40}")
"""What `str` makes of a tracer: `JitTracer<float32[]>` in JAX 0.8, `JitTracer(~float32[])` later."""


class _Checker(string.Formatter):
    # Looks up each field, but formats nothing, because the values are not known yet.

    def __init__(self, what: str, fmt: str, source_line: str) -> None:
        self._what = what
        self._fmt = fmt
        self._field = ""
        self.source_line = source_line

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            if key < len(args):
                return args[key]
            raise IndexError(
                f"the format string {self._fmt!r} needs {key + 1} positional argument{'s' * (key > 0)}, and "
                f"{self._what} got {len(args)}: pass one for each {{}} (write {{{{ and }}}} for braces), at "
                f"{self.source_line}"
            )
        if key in kwargs:
            return kwargs[key]
        raise KeyError(
            f"the format string {self._fmt!r} has a placeholder {{{key}}}, and {self._what} got "
            f"{', '.join(map(repr, kwargs)) or 'no keyword arguments'}: pass {key}=... (write {{{{ and }}}} for "
            f"braces), at {self.source_line}"
        )

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._field = field_name
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            error = _misfit(value, format_spec)
            if error is not None:
                raise type(error)(self._cure(value, format_spec, error))
        return ""

    def _cure(self, value: Any, format_spec: str, error: Exception) -> str:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        name = "" if self._field.isdigit() else self._field
        shown = (
            f"an array of shape {shape} and dtype {dtype}" if shape else f"a {dtype or type(value).__name__}"
        )
        if shape:
            first = "[" + ", ".join("0" * len(shape)) + "]"
            cure = (
                f"{format_spec!r} is for scalars. Write {{{name}}} and set the digits with "
                f"np.printoptions(precision=...) around the {self._what}, or pass an element, x{first}"
            )
        else:
            cure = f"{error}. Write {{{name}}}, or a format for that type"
        return f"the placeholder {{{name}:{format_spec}}} of {self._what} got {shown}: {cure}, at {self.source_line}"

    def check_unused_args(
        self, used_args: set[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        positional = [arg for i, arg in enumerate(args) if i not in used_args]
        keywords = [key for key in kwargs if key not in used_args]
        if positional:
            raise ValueError(
                f"Unused positional arguments to `{self._what}`: {positional}. Give each a placeholder {{}} in the "
                f"format string {self._fmt!r}, at {self.source_line}"
            )
        if keywords:
            raise ValueError(
                f"Unused keyword arguments to `{self._what}`: {keywords}. {self._keyword_cure(keywords)}, at "
                f"{self.source_line}"
            )

    def _keyword_cure(self, keywords: Sequence[str]) -> str:
        options = _OPTIONS.get(self._what, ("name",))
        for key in keywords:
            if key in _ELSEWHERE:
                return f"{self._what} has no {key}=: {_ELSEWHERE[key]}"
            near = difflib.get_close_matches(key, options, n=1)
            if near:
                return f"Did you mean {near[0]}=?"
        # The guidance begins as that of jax.debug.print.
        return (
            f'You may be passing an f-string (i.e, `f"{{x}}"`) into `{self._what}` and instead should pass in a '
            f"regular string. {self._fmt!r} has no placeholder for them, and the options of {self._what} are "
            f"{', '.join(options)}"
        )


_OPTIONS = {
    "hcb.print": ("name", "ordered", "output_stream", "partitioned", "processes", "skip_format_check", STEP),
    "hcb.log": ("level", "logger", "name", "ordered", "partitioned", "processes", "skip_format_check", STEP),
    "hcb.check": ("devices", "name", STEP),
}

_ELSEWHERE = {
    "end": "each text is a line. Put all values of a line into one text",
    "sep": "write the separator into the format string, as in 'x {}, y {}'",
    "flush": "each text is written at once, by another thread. hcb.barrier_wait() waits for it",
    "file": "output_stream= is an object with write(str), as in output_stream=sys.stderr",
    "every": "give it a name, and a rule: name='loss', and once hcb.taps['loss'].every(100)",
    "rate": "give it a name, and a rule: name='loss', and once hcb.taps['loss'].rate(10)",
    "when": "give it a name, and a rule: name='loss', and once hcb.taps['loss'].when(predicate)",
}
"""Options of Python's `print`, and those of rules, that these functions do not have, and what to do instead."""


def _misfit(value: Any, format_spec: str) -> Exception | None:
    # The exception of formatting a value of that shape and dtype, which is not known yet.
    if isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        dtype = jnp.result_type(value)
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return None
        value = np.zeros(np.shape(value) and (1,), dtype)
    elif not isinstance(value, tuple | list | dict):
        return None
    try:
        format(value, format_spec)
    except (TypeError, ValueError) as error:
        return error
    return None
