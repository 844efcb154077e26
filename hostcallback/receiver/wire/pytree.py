"""Pytrees as plain data: lets a process without the program put the arrays of a message back into their containers.

A description is a list whose first item is the kind of node:

    ["array"]                          the next array of the message
    ["float0", [dim, ...]]             zeros of JAX's float0, which has no bytes
    ["value", x]                       a leaf on the host: None, a bool, number, text or bytes
    ["object", text]                   another leaf on the host, by its repr
    ["none"]
    ["tuple" | "list", [child, ...]]
    ["dict", [key, ...], [child, ...]] keys as "value" or "object" descriptions
    ["namedtuple", name, [field, ...], [child, ...]]
    ["node", type name, [child, ...]]  a container of a class that only the program's process has
"""

from __future__ import annotations

import collections
import functools
import keyword
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hostcallback.receiver import limits

MAX_ITEMS = 1 << 16
"""Items that a list or map may state. The decoder allocates a list before it looks for its items."""


def unpack_plain(data: bytes, nesting: int = limits.NESTING) -> Any:
    """What msgpack holds.

    Raises:
        ValueError: it is none, or it is nested deeper than `nesting` containers.
    """
    most = min(len(data), MAX_ITEMS)
    try:
        found = msgpack.unpackb(data, max_array_len=most, max_map_len=most, max_ext_len=0)
    except (
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        raise ValueError(
            f"{len(data)} bytes are no plain data of msgpack: {type(error).__name__}: {error}"
        ) from error
    check_nesting(found, nesting)
    return found


def check_nesting(found: Any, nesting: int) -> None:
    """Raises ValueError if lists and maps are nested deeper than `nesting`. Does not recurse."""
    level = [found]
    for _ in range(nesting + 1):
        level = [
            item
            for container in level
            if isinstance(container, list | dict)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {nesting} containers")


Description = list[Any]

FLOAT0 = np.dtype([("float0", np.void, 0)])
"""JAX's dtype of the tangents of integers (`jax.dtypes.float0`)."""

MAX_DEPTH = limits.NESTING
"""Limit of nested containers: far below the depth that exhausts the interpreter's stack, or msgpack's."""

_Build = Callable[[Iterator[Any]], Any]
"""Builds a pytree, taking its arrays from the iterator."""


class Opaque(NamedTuple):
    """Represents an object of another process.

    Attributes:
        text: its repr there.

    Example:
        receiver.replay("run/taps", bind={"*": lambda value: print(isinstance(value, receiver.Opaque))})
    """

    text: str


class Node(NamedTuple):
    """Represents a container of a class that this process does not have.

    Attributes:
        type_name: the class, with its module.
        children: in the order in which JAX flattens it.

    Example:
        receiver.replay("run/taps", bind={"*": lambda value: print(isinstance(value, receiver.Node))})
    """

    type_name: str
    children: tuple[Any, ...]


def is_plain(value: Any) -> bool:
    """Whether msgpack encodes a value so that it decodes to an equal one."""
    return _is_plain(value, MAX_DEPTH)


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    if type(value) is str:
        return not any(
            "\ud800" <= character <= "\udfff" for character in value
        )  # UTF-8 cannot encode surrogates
    if type(value) is dict:
        return depth > 0 and all(
            type(key) is str and _is_plain(key, 0) and _is_plain(item, depth - 1)
            for key, item in value.items()
        )
    if type(value) is list:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return type(value) in (type(None), bool, float, bytes)


def describe_value(value: Any) -> Description:
    """Describes a leaf or a key on the host."""
    return ["value", value] if is_plain(value) else ["object", repr(value)]


def unflatten_with(description: Description) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that makes the pytree of a message's arrays. It raises ValueError if their number is wrong.

    Raises:
        ValueError: the description is invalid.
    """
    kinds: collections.Counter[str] = collections.Counter()
    build = _parse(description, MAX_DEPTH, kinds)
    count = kinds["array"]

    def unflatten(arrays: Sequence[Any]) -> Any:
        # A message without tapped arrays brings a stand-in, because an equation needs an operand.
        if len(arrays) != count and (count or len(arrays) != 1):
            raise ValueError(
                f"a message with {len(arrays)} array(s) came for a pytree of {count}: the message is damaged, or of "
                "another version of hostcallback"
            )
        return build(iter(arrays))

    return unflatten


_ITEMS: dict[str, tuple[type, ...]] = {
    "array": (),
    "float0": (list,),
    "value": (object,),
    "object": (str,),
    "none": (),
    "tuple": (list,),
    "list": (list,),
    "dict": (list, list),
    "namedtuple": (str, list, list),
    "node": (str, list),
}
"""Types of the items after the kind in a description; the children are last."""

_LEAVES = ("array", "float0", "value", "object", "none")


def _parse(description: Any, depth: int, kinds: collections.Counter[str]) -> _Build:
    # Counts the nodes of each kind.
    _check(description)
    kind, *rest = description
    kinds[kind] += 1
    if kind in _LEAVES:
        return _leaf(kind, rest)
    if not depth:
        raise ValueError(f"a pytree's description is nested deeper than {MAX_DEPTH} containers")
    children = [_parse(child, depth - 1, kinds) for child in rest[-1]]
    make = _container(kind, rest, len(children))
    return lambda arrays: make([child(arrays) for child in children])


def _check(description: Any) -> None:
    if type(description) is not list or not description or type(description[0]) is not str:
        raise ValueError(
            f"{reprlib.repr(description)} does not describe a pytree node, expected a list that starts with its kind"
        )
    kind, *rest = description
    types = _ITEMS.get(kind)
    if types is None:
        raise ValueError(
            f"{reprlib.repr(kind)} is not a kind of pytree node, expected one of {', '.join(_ITEMS)}: the message is "
            "of a newer version of hostcallback"
        )
    if len(rest) != len(types) or not all(map(isinstance, rest, types)):
        expected = ", ".join([repr(kind), *(item.__name__ for item in types)])
        raise ValueError(
            f"{reprlib.repr(description)} does not describe a pytree node, expected [{expected}]"
        )


def _leaf(kind: str, rest: list[Any]) -> _Build:
    if kind == "array":
        return next
    if kind == "float0":
        shape = tuple(rest[0])
        try:
            np.zeros(shape, FLOAT0)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{reprlib.repr(shape)} is not the shape of an array: {error}") from error
        return lambda arrays: np.zeros(shape, FLOAT0)
    check_nesting(rest, MAX_DEPTH + 1)
    value = _static(kind, rest)
    return lambda arrays: value


def _static(kind: str, rest: list[Any]) -> Any:
    if kind == "none":
        return None
    return rest[0] if kind == "value" else Opaque(rest[0])


def _container(kind: str, rest: list[Any], count: int) -> Callable[[list[Any]], Any]:
    if kind == "tuple":
        return tuple
    if kind == "list":
        return list
    if kind == "node":
        return lambda children: Node(rest[0], tuple(children))
    names = rest[-2]
    if len(names) != count:
        raise ValueError(f"a {kind} has {len(names)} keys and {count} children, expected as many")
    if kind == "namedtuple":
        if not all(type(name) is str for name in names):
            raise ValueError(f"{reprlib.repr(names)} are not names of fields, expected texts")
        made: type[Any] = _named_tuple(rest[0], tuple(names))
        return lambda children: made(*children)
    keys = [_key(name) for name in names]
    if len(dict.fromkeys(keys)) != count:
        raise ValueError(f"two keys of a dict have equal descriptions, in {reprlib.repr(names)}")
    return lambda children: dict(zip(keys, children, strict=True))


def _key(description: Any) -> Any:
    _check(description)
    kind, *rest = description
    key = _static(kind, rest) if kind in ("value", "object") else []
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"{reprlib.repr(description)} does not describe a key of a dict") from None
    return key


@functools.lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    # A program's class may have any name; a namedtuple of this process needs an identifier.
    valid = name.isidentifier() and not keyword.iskeyword(name)
    return collections.namedtuple(name if valid else "namedtuple", fields, rename=True)
