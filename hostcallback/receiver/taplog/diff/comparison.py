"""Compares two logs device by device: the first difference, or all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.taplog.diff.messages import MessageComparison, MessageDifference, Tolerance
from hostcallback.receiver.taplog.diff.pairing import (
    ComparedLog,
    DeviceKey,
    Pair,
    Pairing,
    Single,
    TapKey,
    Unaligned,
)
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.selection import Selection


class Difference(NamedTuple):
    """One difference of two logs.

    Attributes:
        device: the device.
        position: in the first log's stream of that device.
        a: message of the first log; None if it has none.
        b: message of the second log; None if it has none.
        found: the difference; "missing" if one log has no message.
    """

    device: DeviceKey
    position: float
    a: LoggedMessage | None
    b: LoggedMessage | None
    found: MessageDifference

    @property
    def logged(self) -> LoggedMessage:
        """The message of the first log, or else of the second."""
        logged = self.a or self.b
        assert logged is not None
        return logged


@dataclass(slots=True)
class Outcome:
    """Results of a comparison other than the differences.

    Attributes:
        compared: number of compared pairs.
        by_tap: the same by the tap's name.
        passed_over: messages whose counterpart was lost, as a log notes, or was folded.
        unaligned: devices whose rest could not be compared, with the messages after the gap: they differ, or belong to
            different taps, so the number of missing messages may be wrong.
        more: further messages without a counterpart, of taps whose first such message is a difference.
    """

    compared: int = 0
    by_tap: Counter[str] = field(default_factory=Counter)
    passed_over: int = 0
    unaligned: list[tuple[DeviceKey, Unaligned]] = field(default_factory=list)
    more: Counter[tuple[bool, TapKey]] = field(default_factory=Counter)


class Comparison:
    """Compares two logs.

    Attributes:
        outcome: results so far.
    """

    def __init__(self, a: ComparedLog, b: ComparedLog, tolerance: Tolerance, wanted: Selection) -> None:
        """Only messages that `wanted` selects by name, device and step are compared; all messages are paired."""
        self._a, self._b = a, b
        self._messages = MessageComparison(tolerance)
        self._wanted = wanted
        self.outcome = Outcome()

    def all(self) -> Iterator[Difference]:
        """Yields all differences, device by device; of unpaired messages only the first per tap and device."""
        for device in self._devices():
            met: set[tuple[bool, TapKey]] = set()
            for difference in self._of_device(device, self._pairing(device)):
                if difference.found.what == "missing":
                    kind = difference.a is not None, self._a.key_of(difference.logged)
                    if kind in met:
                        self.outcome.more[kind] += 1
                        continue
                    met.add(kind)
                yield difference

    def first(self) -> Difference | None:
        """Returns the earliest difference in the order of the first log; over several devices, the earliest in time."""
        found = [first for device in self._devices() if (first := self._first(device)) is not None]
        return min(found, key=lambda difference: difference.logged.message.time_ns, default=None)

    def _first(self, device: DeviceKey) -> Difference | None:
        best: Difference | None = None
        pairing = self._pairing(device)
        for difference in self._of_device(device, pairing):
            if best is None or difference.position < best.position:
                best = difference
            # A pair that is found later may be earlier in the first log.
            if pairing.is_settled(best.position):
                break
        return best

    def _devices(self) -> list[DeviceKey]:
        devices = self._a.devices | self._b.devices
        return sorted(device for device in devices if self._wanted.wants_device(device.device))

    def _pairing(self, device: DeviceKey) -> Pairing:
        a, b = self._a, self._b
        return Pairing(a.emissions(device), b.emissions(device), a.key_of, a.lacks, b.lacks)

    def _of_device(self, device: DeviceKey, pairing: Pairing) -> Iterator[Difference]:
        gaps = 0
        aligned = True
        try:
            for item in pairing:
                if isinstance(item, Unaligned):
                    self.outcome.unaligned.append((device, item))
                    return
                if isinstance(item, Single):
                    if self._wants(item.logged):
                        yield self._of_single(device, item)
                    continue
                if pairing.gaps != gaps:
                    gaps, aligned = pairing.gaps, False
                wants = self._wants(item.a)
                if not wants and aligned:
                    continue
                found = self._messages.difference(item.a, item.b)
                if not aligned:
                    aligned = found is None or self._has_own_step(item, found)
                    if not aligned:
                        self.outcome.unaligned.append((device, Unaligned(item.a, item.b)))
                        return
                if wants:
                    self.outcome.compared += 1
                    self.outcome.by_tap[item.a.message.consumer.name] += 1
                    if found is not None:
                        yield Difference(device, item.position, item.a, item.b, found)
        finally:
            self.outcome.passed_over += pairing.passed_over

    def _has_own_step(self, pair: Pair, found: MessageDifference) -> bool:
        # Messages that differ in values but agree in a leaf `step` do belong together.
        differing = {leaf.leaf for leaf in found.leaves}
        return found.what == "value" and any(
            name.rpartition("/")[2] == STEP and name not in differing for name, *_ in pair.a.leaves
        )

    def _of_single(self, device: DeviceKey, single: Single) -> Difference:
        here = "A" if single.in_a else "B"
        found = MessageDifference("missing", f"only in {here}: {single.reason}", [])
        a, b = (single.logged, None) if single.in_a else (None, single.logged)
        return Difference(device, single.position, a, b, found)

    def _wants(self, logged: LoggedMessage) -> bool:
        return self._wanted.wants_name(logged.message.consumer.name) and self._wanted.wants_step(logged.step)
