"""The texts that messages stand for: those of prints, and what checks found."""

from __future__ import annotations

from receiver.messages.check_report import CheckFailed
from receiver.messages.deferred_errors import DelegatedFailure, MultipleFailures
from receiver.messages.message import Message
from receiver.sinks.check import CheckSink
from receiver.sinks.factory import batchings_of, template_of
from receiver.sinks.format import FormatSink
from receiver.sinks.nonfinite import NonFiniteSink, Watched
from receiver.taplog.reading.logged_message import LoggedMessage
from receiver.wire import pytree as tree
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
    if described.kind == "format":
        return " | ".join(_formatted(described, message))
    if described.kind == "check":
        return f"check failed: {_explained(described, message)}"
    if "operations" in described.params:
        return f"check failed: {_operations(described, message)}"
    return None


def _formatted(described: TapDescriptor, message: Message) -> list[str]:
    texts: list[str] = []
    unflatten = tree.unflatten_with(described.tree)
    FormatSink(template_of(described), unflatten, batchings_of(described), texts.extend)(message)
    return texts


def _explained(described: TapDescriptor, message: Message) -> str:
    unflatten = tree.unflatten_with(described.tree)
    sink = CheckSink(template_of(described), unflatten, batchings_of(described), ())
    explained = sink.explain(message)
    return f"{explained.text} ({explained.where})" if explained.where else explained.text


def _operations(described: TapDescriptor, message: Message) -> str:
    watched = [Watched.from_plain(operation) for operation in described.params["operations"]]
    try:
        NonFiniteSink(tree.unflatten_with(described.tree), watched)(message)
    except MultipleFailures as failures:
        made = [error.error for error in failures.exceptions if isinstance(error, DelegatedFailure)]
        return "; ".join(f.sink.explain(message).text for f in made if isinstance(f, CheckFailed))
    return ""
