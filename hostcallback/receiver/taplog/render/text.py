"""Renders messages of printing taps and failed checks as text."""

from __future__ import annotations

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.factory import texts_of
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
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


def joined(name: str, leaf: str) -> str:
    """Joins the names of a tap and a leaf."""
    return f"{name}/{leaf}" if leaf else name
