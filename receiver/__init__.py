"""The host side of hostcallback: everything after a message has left the device. Runs without JAX.

`receiver.replay` delivers the messages of a tap log once more, and `receiver.LogReader` reads them. A sink is a
function of one `receiver.Message`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from receiver.messages.message import Message, Sink
    from receiver.remote.otlp.exporter import otlp_exporter
    from receiver.replayer.replay import replay
    from receiver.sinks.metrics import JsonlWriter, MetricWriter, metrics
    from receiver.taplog.reading.reader import LogReader
    from receiver.taplog.reading.selection import Selection
    from receiver.wire.pytree import Node, Opaque

__all__ = [
    "JsonlWriter",
    "LogReader",
    "Message",
    "MetricWriter",
    "Node",
    "Opaque",
    "Selection",
    "Sink",
    "metrics",
    "otlp_exporter",
    "replay",
]

_MODULES = {
    "JsonlWriter": "sinks.metrics",
    "LogReader": "taplog.reading.reader",
    "Message": "messages.message",
    "MetricWriter": "sinks.metrics",
    "Node": "wire.pytree",
    "Opaque": "wire.pytree",
    "Selection": "taplog.reading.selection",
    "Sink": "messages.message",
    "metrics": "sinks.metrics",
    "otlp_exporter": "remote.otlp.exporter",
    "replay": "replayer.replay",
}


def __getattr__(name: str) -> Any:
    # Loaded when they are used: they need more of the package than most who import a part of it.
    if name in _MODULES:
        return getattr(importlib.import_module(f"receiver.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
