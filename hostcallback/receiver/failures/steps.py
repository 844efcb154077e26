"""The steps of failures: kept in bounded memory, found in the log later where they are not sent, and told as ranges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

MAX_STEPS = 4096
"""Different steps of failures that are kept of each line, besides the last one."""

MAX_UNKNOWN = 64
"""Failures without a step that are kept of each line, besides the first and the last, to look for their steps."""

Range = tuple[int, int]
"""The first and the last of consecutive steps."""


class Occurrence(NamedTuple):
    """One failure message of a check, or one exception of a tap function.

    Attributes:
        device: of the failure, such as `cpu:0`.
        seq: the message's sequence number on that device.
        time_ns: Unix time of the failure in nanoseconds.
        run_id: the launch of the program, equal on all its devices.
        step: of the failure; None if it is not known.
    """

    device: str
    seq: int
    time_ns: int
    run_id: int
    step: int | None = None

    def __str__(self) -> str:
        """Describes the failure in one phrase."""
        time = datetime.fromtimestamp(self.time_ns // 1_000_000_000).strftime("%H:%M:%S")
        step = "" if self.step is None else f", step {self.step}"
        return f"{time}.{self.time_ns // 1000 % 1_000_000:06d} on {self.device}{step}, message {self.seq}"


StepsOf = Callable[[Sequence[Occurrence]], Mapping[Occurrence, int]]
"""Returns the steps of messages that other messages show."""


@dataclass(slots=True)
class FailedSteps:
    """The steps of the failures of one line. Its owner's lock protects it.

    Attributes:
        max_steps: number of different steps that are kept.
        counts: failures by step.
        unknown: some of the failures without a step.
        unsent: failures that came without a step; of some it may be known by now.
        folded: failures that were only counted.
        is_in_log: whether the log has shown steps.
    """

    max_steps: int = MAX_STEPS
    counts: dict[int, int] = field(default_factory=dict)
    unknown: set[Occurrence] = field(default_factory=set)
    unsent: int = 0
    folded: int = 0
    is_in_log: bool = False

    def note(self, failure: Occurrence, count: int = 1) -> None:
        """Counts `count` failures, of which one is known and the others were only counted."""
        self.folded += count - 1
        if failure.step is not None:
            self.note_step(failure.step, 1)
            return
        self.unsent += 1
        if len(self.unknown) < MAX_UNKNOWN:
            self.unknown.add(failure)

    def note_step(self, step: int, count: int) -> None:
        """Counts failures of a step."""
        if step in self.counts or len(self.counts) < self.max_steps:
            self.counts[step] = self.counts.get(step, 0) + count

    def besides(self, ends: Iterable[Occurrence]) -> set[Occurrence]:
        """Of the first and the last failure, `ends`, those with steps that are not among the steps that are kept."""
        return {one for one in ends if one.step is not None and one.step not in self.counts}

    def known(self, ends: Collection[Occurrence]) -> list[int]:
        """The steps that are known, in increasing order."""
        return sorted({*self.counts, *(one.step for one in self.besides(ends) if one.step is not None)})

    def without(self, ends: Collection[Occurrence], count: int) -> int:
        """The number of failures, of `count`, whose step is not among those that are known."""
        return count - sum(self.counts.values()) - len(self.besides(ends))

    def looked_for(self, ends: Iterable[Occurrence]) -> set[Occurrence]:
        """The failures whose step the log may have."""
        return self.unknown | {one for one in ends if one.step is None}

    def set_steps(self, found: Mapping[Occurrence, int], ends: Iterable[Occurrence]) -> bool:
        """Takes the steps that were found for failures; returns whether any is of this line."""
        known = self.looked_for(ends) & found.keys()
        for failure in known:
            self.note_step(found[failure], 1)
            self.unknown.discard(failure)
        self.is_in_log |= bool(known)  # then it may have those too that were not looked for
        return bool(known)

    def merge(self, later: FailedSteps) -> None:
        """Adds those of later failures of the same line."""
        for step, failures in later.counts.items():
            self.note_step(step, failures)
        self.unsent += later.unsent
        self.folded += later.folded
        self.is_in_log |= later.is_in_log
        left = max(0, MAX_UNKNOWN - len(self.unknown))
        self.unknown.update(sorted(later.unknown, key=lambda failure: failure.time_ns)[:left])

    def copy(self) -> FailedSteps:
        """A copy that does not change with this one."""
        return replace(self, counts=dict(self.counts), unknown=set(self.unknown))


def ranges_of(steps: Iterable[int]) -> list[Range]:
    """The ranges of steps that are in increasing order."""
    return merged((step, step) for step in steps)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Joins ranges that touch each other; they are in the order of their first steps."""
    found: list[Range] = []
    for low, high in ranges:
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def ranges_text(ranges: list[Range], most: int | None = None) -> tuple[str, int]:
    """The text of ranges, `at steps 3, 5 to 8, 12`, and the number of steps that it leaves out.

    It has the first `most` ranges and the last one; all by default.
    """
    shown = ranges if most is None or len(ranges) <= most + 1 else [*ranges[:most], ranges[-1]]
    texts = (str(low) if low == high else f"{low} to {high}" for low, high in shown)
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"at step{'' if is_one else 's'} {', '.join(texts)}", steps_in(ranges) - steps_in(shown)


def told_text(ranges: list[Range], more: int, without: int, what: str, most: int | None = None) -> str:
    """The steps of failures: `at steps 3, 5 to 8, and 41 more`; empty if none is known.

    Args:
        ranges: of steps.
        more: number of further steps.
        without: number of failures whose step is not known.
        what: a word for one of these.
        most: see `ranges_text`.
    """
    if not ranges:
        return ""
    text, left_out = ranges_text(ranges, most)
    parts = [text, *([f"and {left_out + more:,} more"] if left_out + more else [])]
    if without:
        s, are = ("", "is") if without == 1 else ("s", "are")
        parts.append(f"and {without:,} more {what}{s}, whose step{s} {are} not known")
    return ", ".join(parts)


def steps_in(ranges: Iterable[Range]) -> int:
    """The number of steps in ranges."""
    return sum(high - low + 1 for low, high in ranges)
