"""Compares two logs by device, message and element: the first difference, or all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.taplog.diff import pairing
from hostcallback.receiver.taplog.reading.logged_message import Leaf, LoggedMessage, LoggedTap
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render import plain_array, type_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import PROGRESS, bar_names


class Tolerance(NamedTuple):
    """Elements are equal if |a - b| <= absolute + relative * |b|, as in numpy.isclose.

    Applies to floats and complex numbers; integers, booleans and keys must be identical.
    """

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The difference of two arrays of one shape and dtype.

    Attributes:
        index: of the first differing element.
        max_absolute: largest |a - b|; NaN if one of two elements is a NaN.
        max_relative: largest |a - b| / |b|.
        count: number of differing elements.
    """

    index: tuple[int, ...]
    max_absolute: float
    max_relative: float
    count: int


def array_difference(a: Array, b: Array, tolerance: Tolerance) -> ArrayDifference | None:
    """Compares two arrays of one shape and dtype; None if they are equal. NaNs are equal, and so are -0 and 0."""
    if a.tobytes() == b.tobytes():
        return None
    shape = a.shape
    a, b = plain_array(a).reshape(-1), plain_array(b).reshape(-1)
    with np.errstate(all="ignore"):
        different, absolute = (_inexact if a.dtype.kind in "fc" else _exact)(a, b, tolerance)
        if not different.any():
            return None
        absolute = absolute[different]
        relative = absolute / np.abs(
            b[different].astype(np.complex128 if b.dtype.kind == "c" else np.float64)
        )
    first = np.unravel_index(int(different.argmax()), shape)
    return ArrayDifference(
        tuple(int(place) for place in first), float(absolute.max()), float(relative.max()), len(absolute)
    )


def _inexact(a: Array, b: Array, tolerance: Tolerance) -> tuple[Array, Array]:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    absolute = np.abs(a - b)
    allowed = tolerance.absolute + tolerance.relative * np.abs(b)
    # An infinity equals only itself, regardless of the tolerance.
    alike |= np.isfinite(a) & np.isfinite(b) & (absolute <= allowed)
    return ~alike, absolute


def _exact(a: Array, b: Array, tolerance: Tolerance) -> tuple[Array, Array]:
    # The distance of two 64-bit integers may need 64 bits: unsigned arithmetic does not overflow.
    low, high = np.minimum(a, b), np.maximum(a, b)
    return a != b, (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)


MAX_KNOWN = 4096


class LeafDifference(NamedTuple):
    """Two arrays whose elements differ.

    Attributes:
        leaf: name of the leaf.
        a: array of the first log.
        b: array of the second log.
        found: the difference.
    """

    leaf: str
    a: Array
    b: Array
    found: ArrayDifference


class MessageDifference(NamedTuple):
    """The difference of two messages.

    Attributes:
        what: "value", "type" (shapes, dtypes, truncation), "place" (of shards), "tree" or "kwargs".
        text: the difference in words; of values, that of the first differing array.
        leaves: arrays whose elements differ; empty if they cannot be compared.
        leaf: name of the array that cannot be compared.
        sides: what it, or all of the message, is in the first and in the second log, where the text has both.
    """

    what: str
    text: str
    leaves: list[LeafDifference]
    leaf: str = ""
    sides: tuple[str, str] | None = None


class MessageComparison:
    """Compares messages. Pairs of taps are compared once, and remembered."""

    def __init__(self, tolerance: Tolerance) -> None:
        """`tolerance` applies to elements."""
        self._tolerance = tolerance
        self._taps: dict[tuple[LoggedTap, LoggedTap], MessageDifference | None] = {}

    def difference(self, a: LoggedMessage, b: LoggedMessage) -> MessageDifference | None:
        """Compares two messages; None if they are equal."""
        taps = a.tap, b.tap
        if taps not in self._taps:
            if len(self._taps) >= MAX_KNOWN:
                self._taps.clear()
            self._taps[taps] = _of_taps(*taps)
        found = self._taps[taps]
        if found is not None:
            return found
        leaves_a, leaves_b = a.leaves, b.leaves
        types = [(_type(x), _type(y)) for x, y in zip(leaves_a, leaves_b, strict=False)]
        for leaf, (type_a, type_b) in zip(leaves_a, types, strict=False):
            if type_a != type_b:
                return _unlike("type", leaf.name, type_a, type_b)
        if len(leaves_a) != len(leaves_b):
            return _unlike("type", "", f"{len(leaves_a)} arrays", f"{len(leaves_b)} arrays")
        for x, y in zip(leaves_a, leaves_b, strict=True):
            if x.place != y.place:
                return _unlike("place", x.name, f"the shard {x.place}", f"the shard {y.place}")
        differing = [
            LeafDifference(x.name, np.asarray(x.array), np.asarray(y.array), elements)
            for x, y in zip(leaves_a, leaves_b, strict=True)
            if (elements := array_difference(np.asarray(x.array), np.asarray(y.array), self._tolerance))
        ]
        return MessageDifference("value", value_text(differing[0]), differing) if differing else None


def _unlike(what: str, leaf: str, a: str, b: str) -> MessageDifference:
    where = f"{leaf}: " if leaf else ""
    return MessageDifference(what, f"{where}A {a}, B {b}", [], leaf, (a, b))


def _type(leaf: Leaf) -> str:
    whole = leaf.whole_shape
    return type_text(leaf.array) + (
        "" if whole is None else f", the first of an array of shape {list(whole)}"
    )


def _of_taps(a: LoggedTap, b: LoggedTap) -> MessageDifference | None:
    if a.described is None or b.described is None:
        return None
    if a.described.tree != b.described.tree:
        return MessageDifference(
            "tree", "the tapped values have different structures, or differ in parts that are not arrays", []
        )
    if repr(dict(a.described.kwargs)) != repr(dict(b.described.kwargs)):
        given = [str(dict(described.kwargs)) for described in (a.described, b.described)]
        return _unlike("kwargs", "keyword arguments", *given)
    return None


def value_text(leaf: LeafDifference) -> str:
    """Describes the difference of two arrays: `loss[3]: A 0.5, B 0.25 (...)`."""
    found = leaf.found
    place = f"[{', '.join(map(str, found.index))}]" if found.index else ""
    elements = f"{found.count:,} of {leaf.a.size:,} elements differ, " if leaf.a.ndim else ""
    most = "by at most " if leaf.a.ndim else "by "
    return (
        f"{leaf.leaf}{place}: A {leaf.a[found.index]!s}, B {leaf.b[found.index]!s} "
        f"({elements}{most}{found.max_absolute:.3g}, relative {found.max_relative:.3g})"
    ).removeprefix(": ")


class Difference(NamedTuple):
    """One difference of two logs.

    Attributes:
        device: the device.
        position: in the first log's stream of that device.
        a: message of the first log; None if it has none.
        b: message of the second log; None if it has none.
        found: the difference; "missing" if one log has no message.
    """

    device: pairing.DeviceKey
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
        by_clock: names of the taps that are left out, because their messages depend on the clock: bars and times.
    """

    compared: int = 0
    by_tap: Counter[str] = field(default_factory=Counter)
    passed_over: int = 0
    unaligned: list[tuple[pairing.DeviceKey, pairing.Unaligned]] = field(default_factory=list)
    more: Counter[tuple[bool, pairing.TapKey]] = field(default_factory=Counter)
    by_clock: set[str] = field(default_factory=set)

    @property
    def left_out_text(self) -> str:
        """Says which taps are left out; empty if none are."""
        names = sorted(map(printable, self.by_clock))
        if not names:
            return ""
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        what = "1 tap is" if len(names) == 1 else f"{len(names)} taps are"
        return f"{what} left out, because the messages of bars and times depend on the clock: {shown}"


class Comparison:
    """Compares two logs.

    Attributes:
        outcome: results so far.
    """

    def __init__(
        self, a: pairing.ComparedLog, b: pairing.ComparedLog, tolerance: Tolerance, wanted: Selection
    ) -> None:
        """Only messages that `wanted` selects by name, device and step are compared; all messages are paired.

        Taps whose messages depend on the clock are left out, unless `wanted` has names.
        """
        self._a, self._b = a, b
        self._messages = MessageComparison(tolerance)
        self._wanted = wanted
        self._bar_names = bar_names(a.bars | b.bars, a.others | b.others)
        self.outcome = Outcome()

    def all(self) -> Iterator[Difference]:
        """Yields all differences, device by device; of unpaired messages only the first per tap and device."""
        for device in self._devices():
            met: set[tuple[bool, pairing.TapKey]] = set()
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

    def _first(self, device: pairing.DeviceKey) -> Difference | None:
        best: Difference | None = None
        pairs = self._pairing(device)
        for difference in self._of_device(device, pairs):
            if best is None or difference.position < best.position:
                best = difference
            # A pair that is found later may be earlier in the first log.
            if pairs.is_settled(best.position):
                break
        return best

    def _devices(self) -> list[pairing.DeviceKey]:
        devices = self._a.devices | self._b.devices
        return sorted(device for device in devices if self._wanted.wants_device(device.device))

    def _pairing(self, device: pairing.DeviceKey) -> pairing.Pairing:
        a, b = self._a, self._b
        in_a, in_b = (self._without_clock(log.emissions(device)) for log in (a, b))
        return pairing.Pairing(in_a, in_b, a.key_of, a.lacks, b.lacks)

    def _without_clock(
        self, items: Iterator[LoggedMessage | pairing.Gap]
    ) -> Iterator[LoggedMessage | pairing.Gap]:
        for item in items:
            if self._wanted.names or isinstance(item, pairing.Gap) or not _is_by_clock(item):
                yield item
            else:
                name, described = item.message.consumer.name, item.tap.described
                is_bar = described is not None and described.tap_kind is PROGRESS
                self.outcome.by_clock.add(self._bar_names.get(name, name) if is_bar else name)

    def _of_device(self, device: pairing.DeviceKey, pairs: pairing.Pairing) -> Iterator[Difference]:
        gaps = 0
        aligned = True
        try:
            for item in pairs:
                if isinstance(item, pairing.Unaligned):
                    self.outcome.unaligned.append((device, item))
                    return
                if isinstance(item, pairing.Single):
                    if self._wants(item.logged):
                        yield self._of_single(device, item)
                    continue
                if pairs.gaps != gaps:
                    gaps, aligned = pairs.gaps, False
                wants = self._wants(item.a)
                if not wants and aligned:
                    continue
                found = self._messages.difference(item.a, item.b)
                if not aligned:
                    aligned = found is None or self._has_own_step(item, found)
                    if not aligned:
                        self.outcome.unaligned.append((device, pairing.Unaligned(item.a, item.b)))
                        return
                if wants:
                    self.outcome.compared += 1
                    self.outcome.by_tap[item.a.message.consumer.name] += 1
                    if found is not None:
                        yield Difference(device, item.position, item.a, item.b, found)
        finally:
            self.outcome.passed_over += pairs.passed_over

    def _has_own_step(self, pair: pairing.Pair, found: MessageDifference) -> bool:
        # Messages that differ in values but agree in a leaf `step` do belong together.
        differing = {leaf.leaf for leaf in found.leaves}
        return found.what == "value" and any(
            name.rpartition("/")[2] == STEP and name not in differing for name, *_ in pair.a.leaves
        )

    def _of_single(self, device: pairing.DeviceKey, single: pairing.Single) -> Difference:
        here = "A" if single.in_a else "B"
        found = MessageDifference("missing", f"only in {here}: {single.reason}", [])
        a, b = (single.logged, None) if single.in_a else (None, single.logged)
        return Difference(device, single.position, a, b, found)

    def _wants(self, logged: LoggedMessage) -> bool:
        return self._wanted.wants_name(logged.message.consumer.name) and self._wanted.wants_step(logged.step)


def _is_by_clock(logged: LoggedMessage) -> bool:
    described = logged.tap.described
    return described is not None and described.tap_kind.by_clock
