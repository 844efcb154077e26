"""The arrays of messages out of a log, by the names of the leaves that they are."""

from __future__ import annotations

from typing import NamedTuple

from receiver.messages.leaf_names import array_names
from receiver.taplog.reading.logged_message import LoggedMessage, LoggedTap
from receiver.wire.dtypes import Array

MAX_KNOWN = 4096


class Leaf(NamedTuple):
    """One array of a message.

    Attributes:
        name: the keys to it, with slashes between; empty if the array is all that was tapped.
        array: its elements; a `receiver.wire.truncation.TruncatedArray` where a rule truncated it.
        place: where it lies in the whole array, if that was partitioned over devices.
    """

    name: str
    array: Array
    place: tuple[slice, ...] | None


class LoggedLeaves:
    """Takes messages apart, looking at each tap once."""

    def __init__(self) -> None:
        """Starts with nothing remembered."""
        self._names: dict[tuple[LoggedTap, int], list[str]] = {}

    def of(self, logged: LoggedMessage) -> list[Leaf]:
        """The arrays of a message, in order. They have numbers for names if the log does not describe the tap."""
        arrays = logged.message.arrays
        key = logged.tap, len(arrays)
        names = self._names.get(key)
        if names is None:
            if len(self._names) >= MAX_KNOWN:
                self._names.clear()
            names = self._names[key] = _names(logged.tap, len(arrays))
        places = logged.message.shard_index or [None] * len(arrays)
        return [Leaf(*item) for item in zip(names, arrays, places, strict=False)]


def _names(tap: LoggedTap, count: int) -> list[str]:
    if tap.described is None:
        return [str(index) for index in range(count)]
    try:
        return array_names(tap.described.tap_kind, tap.unflatten, count)
    except (ValueError, TypeError):  # not as described: what came is worth having all the same
        return [str(index) for index in range(count)]


def joined(name: str, leaf: str) -> str:
    """The name of a leaf with that of its tap before it."""
    return f"{name}/{leaf}" if leaf else name
