"""Names of the leaves of tapped values: `grads/layer0/w`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from receiver.wire import pytree as tree
from receiver.wire.tap_kind import TapKind


class _Place(NamedTuple):
    # Stands for an array of a message.
    number: int


def by_name(kind: TapKind, value: Any) -> Any:
    """The value of a tap of that kind with its arguments by name or number, where it is made of args and kwargs."""
    if not kind.has_arguments:
        return value
    *first, args, kwargs = value  # print("loss {loss}", loss=x); a check has its predicate before them
    numbered = {str(number): arg for number, arg in enumerate(args)}
    return {**({"predicate": first[0]} if first else {}), **numbered, **kwargs}


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a pytree in order, each with its name: `name`, and the keys to it behind slashes.

    With the name "" the only leaf is called "", and others by the keys alone.
    """
    items: Any
    if isinstance(value, tree.Opaque | _Place):
        yield name, value
        return
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tree.Node):
        items = enumerate(value.children)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        text = key.text if isinstance(key, tree.Opaque) else key
        yield from named_leaves(f"{name}/{text}" if name else str(text), item)


def array_names(kind: TapKind, unflatten: Callable[[Sequence[Any]], Any], count: int) -> list[str]:
    """The names of the `count` arrays of a tap's messages; those that stand in where none is tapped have none.

    Raises:
        ValueError: so many arrays are not those of the tap.
    """
    value = by_name(kind, unflatten([_Place(index) for index in range(count)]))
    places = {leaf.number: name for name, leaf in named_leaves("", value) if isinstance(leaf, _Place)}
    return [places[index] for index in range(len(places))]
