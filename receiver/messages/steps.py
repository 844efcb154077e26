"""Finds the step of a program that a message belongs to: an integer called `step` in the tapped value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hostcallback.receiver.wire.pytree import Description
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

NAME = "step"


class StepSource(NamedTuple):
    """Source of the step in the messages of one tap.

    Attributes:
        array: index of the tapped array that is the step; -1 if the step is constant.
        value: the constant step.
    """

    array: int
    value: int = 0


def step_place(described: TapDescriptor) -> StepSource | None:
    """Finds the source of the step in a tap's messages; None if they have no step.

    It is the first leaf called `step` in the tapped pytree (an item of a dict or a field of a namedtuple, at any depth)
    that is an array or an integer, or else the keyword argument of that name. Only a message shows whether the array is
    an integer without dimensions.
    """
    arrays = 0
    for name, leaf in _leaves(described.tree, ""):
        if leaf[0] == "array":
            if name == NAME:
                return StepSource(arrays)
            arrays += 1
        elif name == NAME and leaf[0] == "value" and type(leaf[1]) is int and _fits(leaf[1]):
            return StepSource(-1, leaf[1])
    value = described.kwargs.get(NAME)
    return StepSource(-1, value) if type(value) is int and _fits(value) else None


def _fits(value: int) -> bool:
    return -(2**63) < value < 2**63


def _leaves(description: Description, name: str) -> Iterator[tuple[str, Description]]:
    # The leaves of a pytree in order, each with its key.
    kind, *rest = description
    if kind in ("tuple", "list", "node"):
        for child in rest[-1]:
            yield from _leaves(child, "")
    elif kind == "namedtuple":
        for field, child in zip(rest[1], rest[2], strict=True):
            yield from _leaves(child, field)
    elif kind == "dict":
        for key, child in zip(rest[0], rest[1], strict=True):
            yield from _leaves(child, _text(key))
    else:
        yield name, description


def _text(key: Any) -> str:
    return key[1] if key[0] == "value" and type(key[1]) is str else ""
