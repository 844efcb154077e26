"""The host side of hostcallback: everything after a message has left the device. Runs without JAX.

`receiver.replay` delivers the messages of a tap log once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from receiver.replayer import replay

__all__ = ["replay"]


def __getattr__(name: str) -> Any:
    # Loaded when it is used: it needs more of the package than most who import a part of it.
    if name == "replay":
        from receiver.replayer import replay

        return replay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
