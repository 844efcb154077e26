"""Plain data of msgpack that came from outside this process."""

from __future__ import annotations

from typing import Any

import msgpack

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
