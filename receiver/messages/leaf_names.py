"""Names of the leaves of tapped values, such as `grads/layer0/w`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.tap_descriptor import TapKind


class _Place(NamedTuple):
    # Placeholder for an array of a message.
    number: int


def by_name(kind: TapKind, value: Any) -> Any:
    """The value of a tap of that kind; args and kwargs become one dict, with arguments by name or number."""
    if not kind.has_arguments:
        return value
    *first, args, kwargs = value  # print("loss {loss}", loss=x); a check has its predicate before them
    numbered = {str(number): arg for number, arg in enumerate(args)}
    return {**({"predicate": first[0]} if first else {}), **numbered, **kwargs}


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a pytree in order, each with its name: `name`, and the keys to the leaf after slashes.

    With the name "" a single leaf is called "", and others by their keys alone.
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
    """Names of the `count` arrays of a tap's messages. A stand-in, sent if no array is tapped, has no name.

    Raises:
        ValueError: the tap's messages do not have `count` arrays.
    """
    value = by_name(kind, unflatten([_Place(index) for index in range(count)]))
    places = {leaf.number: name for name, leaf in named_leaves("", value) if isinstance(leaf, _Place)}
    return [places[index] for index in range(len(places))]
