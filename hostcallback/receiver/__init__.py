"""The host side of hostcallback: everything after a message has left the device. Runs without JAX.

`hostcallback.receiver.replay` delivers the messages of a tap log once more, and `hostcallback.receiver.LogReader` reads
them. A sink is a function of one `hostcallback.receiver.Message`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostcallback.receiver.capsule.file_format import CapsuleError
    from hostcallback.receiver.capsule.reading import Capsule
    from hostcallback.receiver.messages import Message, Sink
    from hostcallback.receiver.remote.otlp.exporter import otlp_exporter
    from hostcallback.receiver.replayer.replay import replay
    from hostcallback.receiver.taplog.reading.reader import LogReader
    from hostcallback.receiver.taplog.reading.selection import Selection
    from hostcallback.receiver.wire.pytree import Node, Opaque

__all__ = [
    "Capsule",
    "CapsuleError",
    "LogReader",
    "Message",
    "Node",
    "Opaque",
    "Selection",
    "Sink",
    "otlp_exporter",
    "replay",
]

_MODULES = {
    "Capsule": "capsule.reading",
    "CapsuleError": "capsule.file_format",
    "LogReader": "taplog.reading.reader",
    "Message": "messages",
    "Node": "wire.pytree",
    "Opaque": "wire.pytree",
    "Selection": "taplog.reading.selection",
    "Sink": "messages",
    "otlp_exporter": "remote.otlp.exporter",
    "replay": "replayer.replay",
}

_REMOVED = dict.fromkeys(
    ("JsonlWriter", "MetricWriter", "metrics"),
    "send values with hcb.metrics and write them with writers=[hcb.jsonl(file)] of outfeed_receiver; `hcb replay "
    "--metrics FILE` writes the scalars of a log",
)


if __name__ == "receiver":
    raise ImportError("this folder is the package hostcallback.receiver: import that one", name=__name__)

if not TYPE_CHECKING:  # else a name that does not exist would be one of type Any

    def __getattr__(name: str) -> Any:
        # Loaded on first use, because these names import more of the package than most importers of one module need.
        if name in _MODULES:
            return getattr(importlib.import_module(f"hostcallback.receiver.{_MODULES[name]}"), name)
        instead = _REMOVED.get(name)
        cure = "" if instead is None else f": it was removed; {instead}"
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{cure}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    # Without the packages that were imported meanwhile, which are internal.
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
