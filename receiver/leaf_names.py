"""Names of the leaves of tapped values: `grads/layer0/w`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from receiver import tree


def by_name(kind: str, value: Any) -> Any:
    """The value of a tap of that kind with its arguments by name or number, where it is a pair of args and kwargs."""
    if kind not in ("format", "callback"):
        return value
    args, kwargs = value  # print("loss {loss}", loss=x)
    return {**{str(number): arg for number, arg in enumerate(args)}, **kwargs}


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a pytree in order, each with its name: `name`, and the keys to it behind slashes."""
    items: Any
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tree.Node):
        items = enumerate(value.children)
    elif isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, tree.Opaque):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from named_leaves(f"{name}/{key}", item)
