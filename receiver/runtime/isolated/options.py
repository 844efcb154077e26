"""What a process that reads the rings of another one keeps of the messages, beside delivering them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Where to, and as whose.

    Attributes:
        record: a tap log's folder, or None.
        forward: how messages are forwarded, a `hostcallback.receiver.remote.options.Forward`, or None. (Forwarding is
            above this.)
        process_index: of the program's process in a program of several.
        local_devices: by name, the number of each device among the program's process's own.
    """

    record: str | None = None
    forward: Any = None
    process_index: int | None = None
    local_devices: Mapping[str, int] = field(default_factory=dict)


NO_OPTIONS = ReaderOptions()


@dataclass(frozen=True, slots=True)
class ForwardingReport:
    """What has become of messages that were to be forwarded.

    Attributes:
        lost_messages: how many were not written to the spool.
        failure: why not.
        unsent_bytes: how much of what was written the collector does not have.
        why: why not.
        folder: where that is.
    """

    lost_messages: int
    failure: str
    unsent_bytes: int
    why: str
    folder: str
