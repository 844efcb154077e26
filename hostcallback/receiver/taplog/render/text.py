"""Renders messages of printing taps and failed checks as text, and splits messages into named leaves."""

from __future__ import annotations

from typing import NamedTuple

from hostcallback.receiver.messages import Message, array_names
from hostcallback.receiver.sinks.factory import texts_of
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, LoggedTap
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


def message_text(logged: LoggedMessage) -> str | None:
    """Returns the text of a printing tap or a failed check; None for messages that are only values.

    Raises:
        Exception: of any type, if the message does not fit its descriptor.
    """
    described = logged.tap.described
    return None if described is None else text_of(described, logged.message)


def text_of(described: TapDescriptor, message: Message) -> str | None:
    """Returns the text of a message of a described tap. See `message_text`.

    Raises:
        Exception: of any type, if the message does not fit its descriptor.
    """
    kind = described.tap_kind
    texts = texts_of(described, message) if kind.is_text else None
    if texts is None:
        return None
    return f"check failed: {'; '.join(texts)}" if kind.is_check else " | ".join(texts)


MAX_KNOWN = 4096


class Leaf(NamedTuple):
    """One array of a message.

    Attributes:
        name: keys of the leaf, joined by slashes; empty if the array alone was tapped.
        array: its elements; a `hostcallback.receiver.wire.truncation.TruncatedArray` if a rule truncated it.
        place: position in the whole array, if that was partitioned over devices.
    """

    name: str
    array: Array
    place: tuple[slice, ...] | None


class LoggedLeaves:
    """Splits messages into leaves, and remembers the names of each tap's leaves."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._names: dict[tuple[LoggedTap, int], list[str]] = {}

    def of(self, logged: LoggedMessage) -> list[Leaf]:
        """Returns the arrays of a message in order. Without a descriptor of the tap, their names are their indices."""
        arrays = logged.message.arrays
        key = logged.tap, len(arrays)
        names = self._names.get(key)
        if names is None:
            if len(self._names) >= MAX_KNOWN:
                self._names.clear()
            names = self._names[key] = leaf_names(logged.tap, len(arrays))
        places = logged.message.shard_index or [None] * len(arrays)
        return [Leaf(*item) for item in zip(names, arrays, places, strict=False)]


def leaf_names(tap: LoggedTap, count: int) -> list[str]:
    """Names of the `count` arrays of a tap's messages; their indices without a descriptor that fits."""
    if tap.described is None:
        return [str(index) for index in range(count)]
    try:
        return array_names(tap.described.tap_kind, tap.unflatten, count)
    except (ValueError, TypeError):  # a descriptor that does not fit the arrays: name them by their indices
        return [str(index) for index in range(count)]


def joined(name: str, leaf: str) -> str:
    """Joins the names of a tap and a leaf."""
    return f"{name}/{leaf}" if leaf else name
