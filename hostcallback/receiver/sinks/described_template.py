"""Fills the format templates of taps that another process described. They are not trusted.

`str.format` would follow any attribute from a value to the interpreter's modules, and would make a text of any width.
Here a field names an argument of the tap by position or keyword. After the name it may only select an item of a
container, a field of a namedtuple, or `shape`, `dtype`, `ndim` or `size` of an array. The width, the precision and the
length of the text are limited.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.wire.pytree import Node, Opaque
from hostcallback.receiver.wire.truncation import TruncatedArray, head_of

ARRAY_ATTRIBUTES = frozenset({"dtype", "ndim", "shape", "size"})
"""Attributes of an array that a field may name."""

HEAD = 8
"""Elements that are shown of an array with more than `limits.TEXT_ELEMENTS`."""

_FIELD = re.compile(r"([^.\[\]{}]*)((?:\.[^.\[\]{}]+|\[[^\]]+\])*)")
_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]+)\]")
_DIGITS = re.compile(r"\d+")


class RefusedTemplateError(ValueError):
    """A template is not filled; the text says why."""


class _Field(NamedTuple):
    # A replacement field: the argument, the steps from there, the conversion, and the specification in parts.
    argument: int | str
    steps: tuple[tuple[str, int | str], ...]
    conversion: str
    spec: tuple[_Part, ...]


_Part = str | _Field


def fill(template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the text of a template; for a refused one, its reason and the template. Never raises an Exception."""
    try:
        return _fill(_parsed(template), args, kwargs)
    except Exception as error:
        reason = str(error) if isinstance(error, RefusedTemplateError) else f"{type(error).__name__}: {error}"
        shown = template if len(template) <= 200 else template[:200] + "..."
        return cut(f"(the template {shown!r} is not filled: {reason[:500]})")


def join(template: str, args: Sequence[Any]) -> str:
    """Returns the text of a template without fields, followed by the arguments."""
    texts = [template[: limits.TEXT_CHARS + 1]]
    for arg in args:
        if sum(map(len, texts)) > limits.TEXT_CHARS:
            break
        texts.append(str(bounded(arg)))
    return cut(" ".join(texts))


def cut(text: str) -> str:
    """Returns the text, cut if it is longer than `limits.TEXT_CHARS`."""
    if len(text) <= limits.TEXT_CHARS:
        return text
    return f"{text[: limits.TEXT_CHARS]}... (cut at {limits.TEXT_CHARS} characters)"


def bounded(value: Any, threshold: int | None = None) -> Any:
    """Returns a value whose text has at most `limits.TEXT_ELEMENTS` elements of each array.

    Args:
        value: a pytree.
        threshold: numpy's print threshold for the value; None for the current one.
    """
    if isinstance(value, np.ndarray):
        return value if _shown_elements(value, threshold) <= limits.TEXT_ELEMENTS else _head(value)
    if isinstance(value, Opaque):
        return value
    if isinstance(value, Node):
        return Node(value.type_name, tuple(bounded(child, threshold) for child in value.children))
    if isinstance(value, tuple):
        items = [bounded(item, threshold) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [bounded(item, threshold) for item in value]
    if isinstance(value, dict):
        return {key: bounded(item, threshold) for key, item in value.items()}
    return value


def _shown_elements(array: np.ndarray[Any, Any], threshold: int | None) -> int:
    options = np.get_printoptions()
    if array.size <= (options["threshold"] if threshold is None else threshold):
        return array.size
    shown = 1
    for dim in array.shape:
        shown *= min(dim, 2 * options["edgeitems"] + 1)
    return shown


def _head(array: np.ndarray[Any, Any]) -> TruncatedArray:
    whole = (array.whole_shape if isinstance(array, TruncatedArray) else None) or array.shape
    return head_of(np.asarray(array).reshape(-1)[:HEAD].copy(), whole)


# Cached, because a tap has one template for all its messages.
@functools.lru_cache(maxsize=256)
def _parsed(template: str) -> tuple[_Part, ...]:
    if len(template) > limits.TEMPLATE_CHARS:
        raise RefusedTemplateError(
            f"it has {len(template)} characters, at most {limits.TEMPLATE_CHARS} are allowed"
        )
    return _Parser().parts(template, nested=False)


class _Parser:
    def __init__(self) -> None:
        self._fields = 0
        self._next: int | None = None
        self._numbered = False

    def parts(self, template: str, *, nested: bool) -> tuple[_Part, ...]:
        found: list[_Part] = []
        try:
            pieces = [*string.Formatter().parse(template)]
        except ValueError as error:
            raise RefusedTemplateError(str(error)) from None
        for literal, name, spec, conversion in pieces:
            if literal:
                found.append(literal)
            if name is not None:
                found.append(self._field(name, spec or "", conversion, nested=nested))
        return tuple(found)

    def _field(self, name: str, spec: str, conversion: str | None, *, nested: bool) -> _Field:
        self._fields += 1
        if self._fields > limits.TEMPLATE_FIELDS:
            raise RefusedTemplateError(f"it has more than {limits.TEMPLATE_FIELDS} fields")
        matched = _FIELD.fullmatch(name)
        if matched is None:
            raise RefusedTemplateError(f"{name[:80]!r} is not a field")
        if conversion not in (None, "r", "s", "a"):
            raise RefusedTemplateError(f"!{conversion[:8]} is not a conversion")
        first, rest = matched.groups()
        argument = self._argument(first)
        steps = tuple(_step(attribute, item) for attribute, item in _STEP.findall(rest))
        if nested and "{" in spec:
            raise RefusedTemplateError("its fields are nested too deep")
        return _Field(argument, steps, conversion or "", self.parts(spec, nested=True))

    def _argument(self, first: str) -> int | str:
        # `str.format` refuses a mixture too.
        if first.isdecimal():
            if self._next is not None:
                raise RefusedTemplateError("some of its fields are numbered, and some are not")
            self._numbered = True
            return _number(first)
        if first:
            return first
        if self._numbered:
            raise RefusedTemplateError("some of its fields are numbered, and some are not")
        number, self._next = self._next or 0, (self._next or 0) + 1
        return number


def _number(digits: str) -> int:
    if len(digits) > 9:
        raise RefusedTemplateError(f"{digits[:20]}... is not a position")
    return int(digits)


def _step(attribute: str, item: str) -> tuple[str, int | str]:
    if attribute:
        return "attribute", attribute
    return "item", _number(item) if item.isdecimal() else item


def _fill(parts: tuple[_Part, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    texts: list[str] = []
    length = 0
    for part in parts:
        text = part if isinstance(part, str) else _field_text(part, args, kwargs)
        texts.append(text)
        length += len(text)
        if length > limits.TEXT_CHARS:  # stops now: each further field may add as much again
            break
    return cut("".join(texts))


def _field_text(field: _Field, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    value = _value(field, args, kwargs)
    spec = _fill(field.spec, args, kwargs) if field.spec else ""
    # Before `format`, which would allocate as many characters as the width says.
    for digits in _DIGITS.findall(spec):
        if len(digits) > 9 or int(digits) > limits.FIELD_WIDTH:
            raise RefusedTemplateError(
                f"the width or precision {digits[:20]} is more than {limits.FIELD_WIDTH}"
            )
    if len(spec) > 64:
        raise RefusedTemplateError(
            f"a format specification has {len(spec)} characters, at most 64 are allowed"
        )
    convert = _CONVERSIONS.get(field.conversion)
    shown = bounded(value)
    return format(shown if convert is None else convert(shown), spec)


_CONVERSIONS: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}


def _value(field: _Field, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    argument = field.argument
    if isinstance(argument, int):
        if argument >= len(args):
            raise RefusedTemplateError(f"there is no argument {argument}")
        value = args[argument]
    elif argument in kwargs:
        value = kwargs[argument]
    else:
        raise RefusedTemplateError(f"there is no argument {argument[:80]!r}")
    for kind, key in field.steps:
        value = _attribute(value, str(key)) if kind == "attribute" else _item(value, key)
    return value


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray) and name in ARRAY_ATTRIBUTES:
        return {"dtype": value.dtype.name, "ndim": value.ndim, "shape": value.shape, "size": value.size}[name]
    if isinstance(value, tuple) and not isinstance(value, Node | Opaque):
        fields: tuple[str, ...] = getattr(type(value), "_fields", ())
        if name in fields:
            return value[fields.index(name)]
    raise RefusedTemplateError(
        f"a template from outside this process may not name the attribute {name[:80]!r}"
    )


def _item(value: Any, key: int | str) -> Any:
    if isinstance(key, int) and isinstance(value, np.ndarray | list | tuple):
        return np.asarray(value)[key] if isinstance(value, np.ndarray) else value[key]
    if type(value) is dict and key in value:
        return value[key]
    raise RefusedTemplateError(f"there is no item {str(key)[:80]!r}")


_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "edgeitems": lambda found: type(found) is int and 0 <= found <= limits.FIELD_WIDTH,
    "threshold": lambda found: type(found) is int and found >= 0,
    "floatmode": lambda found: found in ("fixed", "unique", "maxprec", "maxprec_equal"),
    "precision": lambda found: found is None or (type(found) is int and 0 <= found <= limits.FIELD_WIDTH),
    "suppress": lambda found: type(found) is bool,
    "linewidth": lambda found: type(found) is int and found > 0,
    "nanstr": lambda found: type(found) is str and len(found) <= 64,
    "infstr": lambda found: type(found) is str and len(found) <= 64,
    "sign": lambda found: found in ("-", "+", " "),
    "legacy": lambda found: found is False or found in ("1.13", "1.21", "1.25", "2.1", "2.2"),
}
"""The print options of numpy that a description may set, and their valid values. `formatter` is missing: it is code."""


def print_options(found: Mapping[str, Any]) -> dict[str, Any]:
    """Reads numpy's print options from a description; options that it omits have the values of this process.

    Raises:
        ValueError: the value of an option is unknown to numpy, or too large.
    """
    if not isinstance(found, dict):
        raise ValueError(f"the print options are a {type(found).__name__}, expected a map")
    options: dict[str, Any] = {**np.get_printoptions()}
    for name, is_valid in _OPTIONS.items():
        if name in found and name in options:
            if not is_valid(found[name]):
                raise ValueError(f"the print option {name} is {str(found[name])[:80]!r}")
            options[name] = found[name]
    return options
