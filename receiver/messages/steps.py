"""Which step of a program a message belongs to: an integer called `step` in what it brings, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from receiver.wire.pytree import Description
from receiver.wire.tap_descriptor import TapDescriptor

NAME = "step"


class StepSource(NamedTuple):
    """Where messages of one tap say which step they are of.

    Attributes:
        array: index of the tapped array that says so; -1 for none.
        value: the step, if it is part of the tap itself.
    """

    array: int
    value: int = 0


def step_place(described: TapDescriptor) -> StepSource | None:
    """Where messages of a tap say which step they are of; None if they do not.

    It is the first leaf called `step` in the tapped pytree (an item of a dict or a field of a namedtuple, at any depth)
    that is an array or an integer, or else the keyword argument of that name. Whether the array is an integer of no
    dimension is for each message to tell.
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
    # The leaves of a pytree in order, each with the key it is under.
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
