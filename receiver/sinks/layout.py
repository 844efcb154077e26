"""Pytrees as text, laid out as host_callback's id_print did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from receiver.wire.truncation import Head

WIDTH = 80
"""Columns that a container may take on one line."""


class _Container(NamedTuple):
    # A tuple, list or dict: its brackets, what is in them with a label each, and all of it on one line.
    opening: str
    parts: list[tuple[str, _Container | str]]
    closing: str
    flat: str


def format_value(value: Any, threshold: int | None) -> str:
    """Formats a pytree as host_callback did: `( a b )`, `[ a b ]`, `{ k=v }`, arrays by `array2string`.

    A container goes on one line if that fits into 80 columns; otherwise one element a line, indented by two. That is
    how JAX's pretty printer lays it out (Lindig, Strictly Pretty, 2000): to the letter, so the lines of an array are
    not indented, and its line breaks count as columns.

    Args:
        value: what to format.
        threshold: numpy's: arrays with more elements are summarised; None for numpy's setting.
    """
    return _lay_out(_describe(value, threshold), 0, 0)


def _describe(value: Any, threshold: int | None) -> _Container | str:
    if isinstance(value, tuple):
        return _contain("( ", [("", _describe(item, threshold)) for item in value], " )")
    if isinstance(value, list):
        return _contain("[ ", [("", _describe(item, threshold)) for item in value], " ]")
    if isinstance(value, dict):
        return _contain("{ ", [(f"{key}=", _describe(value[key], threshold)) for key in _sorted(value)], " }")
    if isinstance(value, np.ndarray):
        label = value.label if isinstance(value, Head) else ""
        return label + np.array2string(np.asarray(value), threshold=threshold)
    return str(value)


def _sorted(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # keys of several types
        return sorted(keys, key=str)


def _contain(opening: str, parts: list[tuple[str, _Container | str]], closing: str) -> _Container:
    flat = " ".join(label + (part if isinstance(part, str) else part.flat) for label, part in parts)
    return _Container(opening, parts, closing, opening + flat + closing)


def _lay_out(part: _Container | str, indent: int, column: int) -> str:
    if isinstance(part, str):
        return part
    if column + len(part.flat) <= WIDTH:
        return part.flat
    indent += 2
    column += len(part.opening)
    texts = []
    for label, item in part.parts:
        texts.append(label + _lay_out(item, indent, column + len(label)))
        column = indent  # of those after the first
    return part.opening + ("\n" + " " * indent).join(texts) + part.closing
