"""Per-device statistics of a receiver, and their summary as a text table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hostcallback.receiver.text import preformatted, table


@dataclass(slots=True)
class DeviceStats:
    """Counts of one device's receiver within one scope.

    Attributes:
        device: the device's name, such as `cpu:0`.
        delivered: messages handed to their tap function (also those whose tap raised).
        delivered_bytes: bytes of the tapped arrays in those messages.
        dropped: messages a back-pressure policy dropped.
        failed: delivered messages whose tap function raised.
        unknown: messages for consumer ids that were not registered.
        unrecorded: messages that the receiver's recorder could not write.
        tap_sec: seconds spent in tap functions.
        queued_messages: messages in the device's queue at the time of the snapshot; 0 once the receiver is closed.
        queued_bytes: bytes of the queued messages.
        waiting_emissions: emissions that waited for room at the time of the snapshot.
        first_time_ns: Unix time at which the first message was emitted; 0 for none.
        last_time_ns: Unix time at which the last message was emitted; 0 for none.
    """

    device: str
    delivered: int = 0
    delivered_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    unknown: int = 0
    unrecorded: int = 0
    tap_sec: float = 0.0
    queued_messages: int = 0
    queued_bytes: int = 0
    waiting_emissions: int = 0
    first_time_ns: int = 0
    last_time_ns: int = 0

    @property
    def messages_per_sec(self) -> float:
        """Messages divided by the seconds from the first emission to the last; 0 for fewer than two messages."""
        span = (self.last_time_ns - self.first_time_ns) * 1e-9
        return self.delivered / span if span > 0 else 0.0

    def add(self, other: DeviceStats) -> None:
        """Adds another row's counts to this row."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def subtract(self, other: DeviceStats) -> None:
        """Reverses `add`."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) - getattr(other, name))

    def _repr_html_(self) -> str:
        return StatsRows([self])._repr_html_()

    def copy(self) -> DeviceStats:
        """Returns a copy."""
        return dataclasses.replace(self)


_COUNTS = ("delivered", "delivered_bytes", "dropped", "failed", "unknown", "unrecorded", "tap_sec")


class ShownAsSummary:
    """Shows an object by its summary: as text, and in notebooks as HTML."""

    def summary(self) -> str:
        """Returns the statistics as a text table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return preformatted(self.summary())


HEAD = ("device", "messages", "bytes", "rate", "dropped", "failed", "time in taps")


def _texts(row: DeviceStats) -> tuple[str, ...]:
    return (
        row.device, f"{row.delivered:,}", _bytes(row.delivered_bytes), f"{row.messages_per_sec:,.0f}/s",
        f"{row.dropped:,}", f"{row.failed:,}", f"{row.tap_sec:.3f} s",
    )  # fmt: skip


class StatsRows(list[DeviceStats]):
    """The rows of a receiver; a table in notebooks."""

    def _repr_html_(self) -> str:
        return table(HEAD, map(_texts, self))


def summarize(name: str, stats: Sequence[DeviceStats]) -> str:
    """Returns a text table with one line per device that had messages."""
    title = f"receiver {name!r}" if name else "receiver"
    active = [s for s in stats if s.delivered or s.dropped or s.unknown]
    if not active:
        return f"{title}: no messages"
    head, rows = HEAD, [_texts(row) for row in active]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    unknown = sum(s.unknown for s in active)
    if unknown:
        lines.append(f"{unknown:,} message(s) for unknown consumers")
    unrecorded = sum(s.unrecorded for s in active)
    if unrecorded:
        lines.append(f"{unrecorded:,} message(s) could not be recorded")
    return "\n".join([title, *lines])


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
