"""Options and counters of a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from hostcallback.receiver.files import PRIVATE, Permissions

FLUSH_BYTES = 256 << 10
FLUSH_SEC = 0.1
"""Limits of unwritten messages of one device: bytes, and seconds since the first one came."""

SEGMENT_BYTES = 64 << 20
SEGMENT_SEC = 3600.0

CONFIG_BYTES = 64 << 10
"""Largest configuration of a run: each segment repeats it."""


def plain_config(config: object) -> dict[str, Any]:
    """Returns a run's configuration as plain data: arrays of one element as numbers, other objects as their texts.

    Raises:
        TypeError: it is not a mapping.
        ValueError: it has more than `CONFIG_BYTES`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config is of type {type(config).__name__}, expected a dict such as {{'lr': 0.1}}; of an "
            "argparse.Namespace or a dataclass give vars(config)"
        )
    found: dict[str, Any] = _plain(config)
    nbytes = len(msgpack.packb(found))
    if nbytes > CONFIG_BYTES:
        raise ValueError(
            f"config takes {nbytes:,} bytes, expected at most {CONFIG_BYTES:,}: give the settings that tell runs apart"
        )
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if (
        value is None
        or isinstance(value, bool | float | str)
        or (type(value) is int and abs(value) < 1 << 63)
    ):
        return value
    return str(value)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a log.

    Attributes:
        segment_bytes: length at which a segment is completed and a new one started.
        segment_sec: age in seconds at which a segment is completed and a new one started.
        keep_bytes: limit of this process's segments together, beyond which the oldest are deleted, but for the last
            complete one; None to keep all.
        compress: whether messages are compressed.
        fsync: whether each write is synced to the disk, so that it survives a crash of the machine.
        process_index: of this process in a program of several.
        flush_bytes: unwritten bytes of a device at which its messages are written.
        flush_sec: seconds after which unwritten messages are written.
        job: identifies the run of a program of several processes, equal in all of them; empty for a program of one.
        mode: permissions of the files.
        run: name of the run, by which readers tell runs in one folder apart; empty for none.
        config: configuration of the run, plain data of at most `CONFIG_BYTES`; see `plain_config`.
    """

    segment_bytes: int = SEGMENT_BYTES
    segment_sec: float = SEGMENT_SEC
    keep_bytes: int | None = None
    compress: bool = False
    fsync: bool = False
    process_index: int | None = None
    flush_bytes: int = FLUSH_BYTES
    flush_sec: float = FLUSH_SEC
    job: str = ""
    mode: int = PRIVATE.mode
    run: str = ""
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for sizes and times that are not positive, and a mode that a log cannot have."""
        _ = self.permissions
        for name in ("segment_bytes", "segment_sec", "keep_bytes", "flush_bytes", "flush_sec"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, expected more than 0")

    @property
    def permissions(self) -> Permissions:
        """Permissions of the files and folders."""
        return Permissions(self.mode)


@dataclass(slots=True)
class LogCounters:
    """Counters of a log.

    Attributes:
        messages: written messages.
        nbytes: of all segments so far, deleted ones included.
        lost_messages: messages that could not be written, with the failures of checks that were folded into them.
        lost_bytes: their bytes.
        lost_by_device: lost messages by the device's name.
        failure: the last error; empty if there was none.
    """

    messages: int = 0
    nbytes: int = 0
    lost_messages: int = 0
    lost_bytes: int = 0
    lost_by_device: Counter[str] = field(default_factory=Counter)
    failure: str = ""
