"""Checks a format string against its arguments when a print is traced, because the user's line is known then."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hostcallback.tracing.source_line import user_source_line


def placeholders(fmt: str) -> Iterator[str]:
    """Yields the fields of a format string as written, without format specifications: `x.shape`, `x!r`."""
    for _, name, spec, conversion in string.Formatter().parse(fmt):
        if name is not None:
            yield f"{name}!{conversion}" if conversion else name
            yield from placeholders(spec or "")


def check_format(what: str, fmt: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that each placeholder has an argument and each argument a placeholder, as `jax.debug.print` does.

    Args:
        what: name of the calling function, for errors.
        fmt: the format string.
        args: its positional arguments; may be traced.
        kwargs: its keyword arguments; may be traced.

    Raises:
        ValueError: an argument is not used, or the format string is malformed.
        IndexError: a positional argument is missing.
        KeyError: a keyword argument is missing.
    """
    checker = _Checker(what, fmt, str(user_source_line()))
    try:
        checker.vformat(fmt, args, kwargs)
    except Exception as error:
        if checker.source_line not in str(error):
            error.add_note(f"{what} was called at {checker.source_line}")
        raise


class _Checker(string.Formatter):
    # Looks up each field, but formats nothing, because the values are not known yet.

    def __init__(self, what: str, fmt: str, source_line: str) -> None:
        self._what = what
        self._fmt = fmt
        self.source_line = source_line

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            if key < len(args):
                return args[key]
            raise IndexError(
                f"the format string {self._fmt!r} has a placeholder for positional argument {key}, and {self._what} "
                f"got {len(args)} of them: pass one for each {{}} (write {{{{ and }}}} for braces), at "
                f"{self.source_line}"
            )
        if key in kwargs:
            return kwargs[key]
        raise KeyError(
            f"the format string {self._fmt!r} has a placeholder {{{key}}}, and {self._what} got "
            f"{', '.join(map(repr, kwargs)) or 'no keyword arguments'}: pass {key}=... (write {{{{ and }}}} for "
            f"braces), at {self.source_line}"
        )

    def format_field(self, value: Any, format_spec: str) -> str:
        return ""

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
            # The guidance is jax.debug.print's.
            raise ValueError(
                f"Unused keyword arguments to `{self._what}`: {keywords}. You may be passing an f-string (i.e, "
                f'`f"{{x}}"`) into `{self._what}` and instead should pass in a regular string, at '
                f"{self.source_line}"
            )
