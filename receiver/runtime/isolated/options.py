"""What a process that reads the rings of another one keeps of the messages, beside delivering them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from receiver.remote.options import Forward


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where to, and as whose.

    Attributes:
        record: a tap log's folder, or None.
        forward: how messages are forwarded, or None.
        process_index: of the program's process in a program of several.
        local_devices: by name, the number of each device among the program's process's own.
    """

    record: str | None = None
    forward: Forward | None = None
    process_index: int | None = None
    local_devices: Mapping[str, int] = field(default_factory=dict)


NOTHING = Keeping()
