"""How a reader process records and forwards messages in addition to delivering them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a reader process.

    Attributes:
        record: folder of a tap log, or None.
        forward: a `hostcallback.receiver.remote.options.Forward`, or None. The type is Any, because the package
            `remote` imports this one.
        process_index: index of the parent process in a program of several processes; None for a single process.
        local_devices: by device name, its index among the local devices of the parent process.
        run: name of the run of the parent process; empty for the reader process's own.
    """

    record: str | None = None
    forward: Any = None
    process_index: int | None = None
    local_devices: Mapping[str, int] = field(default_factory=dict)
    run: str = ""


NO_OPTIONS = ReaderOptions()


@dataclass(frozen=True, slots=True)
class ForwardingReport:
    """Result of forwarding in a reader process.

    Attributes:
        lost_messages: messages that were not written to the spool.
        failure: reason why not.
        unsent_bytes: spooled bytes that the collector does not have.
        why: reason why not.
        folder: folder of the spool.
    """

    lost_messages: int
    failure: str
    unsent_bytes: int
    why: str
    folder: str
