"""The texts that messages stand for: those of prints, and what checks found."""

from __future__ import annotations

from receiver.messages.message import Message
from receiver.sinks.factory import texts_of
from receiver.taplog.reading.logged_message import LoggedMessage
from receiver.wire.tap_descriptor import TapDescriptor


def message_text(logged: LoggedMessage) -> str | None:
    """What a print prints, or a check says; None for messages that are just values.

    Raises:
        Exception: of any kind, where the message is not as its description says.
    """
    described = logged.tap.described
    return None if described is None else text_of(described, logged.message)


def text_of(described: TapDescriptor, message: Message) -> str | None:
    """The same for a message of the tap that is described so.

    Raises:
        Exception: as above.
    """
    kind = described.tap_kind
    texts = texts_of(described, message) if kind.is_text else None
    if texts is None:
        return None
    return f"check failed: {'; '.join(texts)}" if kind.is_check else " | ".join(texts)
