"""Selects what to read of a log: the run, and conditions on messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import errors, tap_arguments
from hostcallback.receiver.messages import launch_bits
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, NO_STEP
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions on the messages that a reader yields; by default none. A message must meet all of them.

    Attributes:
        names: patterns, as of file names, of which one must match the tap's name; empty for all.
        first_step: first selected step.
        last_step: last selected step; if either is given, messages without a step are not selected.
        devices: patterns, such as `cpu:0`, of which one must match the device's name; empty for all.
        since_ns: Unix time in nanoseconds; earlier messages are not selected.
        until_ns: Unix time in nanoseconds; messages of that time or later are not selected.
        launch: the launch of the program: six hexadecimal digits, as in reports, or its whole `run_id` in decimal.

    Example:
        losses = list(receiver.LogReader("run/taps").messages(receiver.Selection(names=("loss",))))
    """

    names: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    devices: tuple[str, ...] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    launch: str | None = None

    def wants_name(self, name: str) -> bool:
        """Whether taps of that name are selected."""
        return not self.names or any(tap_arguments.matches(name, pattern) for pattern in self.names)

    def wants_device(self, device: str) -> bool:
        """Whether messages of that device are selected."""
        return not self.devices or any(fnmatchcase(device, pattern) for pattern in self.devices)

    def wants_step(self, step: int | None) -> bool:
        """Whether messages of that step, None for none, are selected."""
        if step is None or not self.by_step:
            return not self.by_step
        low, high = self.first_step, self.last_step
        return (low is None or step >= low) and (high is None or step <= high)

    @property
    def by_step(self) -> bool:
        """Whether steps are a condition."""
        return self.first_step is not None or self.last_step is not None

    def wants_chunk(self, chunk: Chunk, wanted: Mapping[int, bool]) -> bool:
        """Whether a chunk's header allows selected messages, apart from their steps.

        Args:
            chunk: of messages.
            wanted: for each consumer number whether its taps are selected.
        """
        if self.since_ns is not None and chunk.max_time_ns < self.since_ns:
            return False
        if self.until_ns is not None and chunk.min_time_ns >= self.until_ns:
            return False
        if not self.names or chunk.consumers == ALL_CONSUMERS:
            return True
        mask = 0
        for number, is_wanted in wanted.items():
            mask |= is_wanted << (number & 63)
        return bool(chunk.consumers & mask)

    def wants_steps(self, chunk: Chunk) -> bool:
        """Whether a chunk's header allows selected steps. Its last messages may belong to a step of the next chunk."""
        if not self.by_step:
            return True
        # Steps may decrease within a chunk, as when a program restarts its loop: the header has their bounds.
        is_early = self.first_step is not None and chunk.max_step < self.first_step
        is_late = self.last_step is not None and chunk.min_step > self.last_step
        return not (chunk.max_step == NO_STEP or is_early or is_late)

    def choose(self, block: FrameBlock, steps: Array) -> Array:
        """Selects messages by their times, launches and steps (int64, one per message); returns a bool mask.

        Raises:
            ValueError: `launch` is neither a short name nor a number.
        """
        mask = np.ones(len(block), np.bool_)
        if self.since_ns is not None:
            mask &= block.times_ns >= self.since_ns
        if self.until_ns is not None:
            mask &= block.times_ns < self.until_ns
        if self.launch is not None:
            bits, value = launch_bits(self.launch)
            mask &= (block.launches & bits) == value
        if self.by_step:
            mask &= steps != NO_STEP
            if self.first_step is not None:
                mask &= steps >= self.first_step
            if self.last_step is not None:
                mask &= steps <= self.last_step
        return mask


ALL = "all"
"""In place of a name: all runs."""


class LoggedRun(NamedTuple):
    """A run whose messages are in a log.

    Attributes:
        name: its name; empty for the segments of earlier versions, which are one run.
        started_ns: Unix time in nanoseconds at which its first segment was begun.
        last_ns: the same for its last segment.
        processes: number of its processes, restarts included.
    """

    name: str
    started_ns: int
    last_ns: int
    processes: int

    @property
    def title(self) -> str:
        """The name for messages to users."""
        return self.name or "(without a name)"


def unread_text(runs: Sequence[LoggedRun], read: Collection[str], choose: str) -> str:
    """Says which runs are not read; empty if all are. `runs` has the last one last; `choose`: how to read them."""
    others = [known for known in runs if known.name not in read]
    if not others:
        return ""
    shown = ", ".join(printable(known.title) for known in reversed(others[-5:]))
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    (last, *_) = [known for known in reversed(runs) if known.name in read]
    return f"of {len(runs)} runs, this is the last, {printable(last.title)}; {choose}: {shown}{more}"


class RunCatalog:
    """The runs of some segments."""

    def __init__(self) -> None:
        """No segment is known yet."""
        self._times: dict[str, list[int]] = {}
        self._processes: dict[str, set[Any]] = {}

    def add(self, run: str, process: str, created_ns: object) -> None:
        """Adds a segment: its run and process, and when it was begun, as its header says."""
        time_ns = created_ns if type(created_ns) is int else 0
        times = self._times.setdefault(run, [time_ns, time_ns])
        times[:] = min(times[0], time_ns), max(times[1], time_ns)
        self._processes.setdefault(run, set()).add(process)

    @property
    def runs(self) -> list[LoggedRun]:
        """The runs, that with the newest segment last."""
        found = [
            LoggedRun(name, first, last, len(self._processes[name]))
            for name, (first, last) in self._times.items()
        ]
        return sorted(found, key=lambda run: (run.last_ns, run.started_ns))

    def newest(self, among: Iterable[str]) -> str:
        """Returns the name of the last of some runs."""
        return max(among, key=lambda name: (self._times[name][1], self._times[name][0]))

    def chosen(self, wanted: str) -> set[str]:
        """Returns the names of the runs that match `wanted`, of which there is at least one.

        Raises:
            NoSuchRunError: no run matches.
        """
        names = [run.name for run in self.runs]
        found = {name for name in names if is_run(name, wanted)}
        if not found:
            named = [name for name in names if name]
            near = difflib.get_close_matches(wanted, named, n=3) or named[-5:]
            there = (
                f"there are {', '.join(near)}{' and others' * (len(named) > len(near))}"
                if near
                else "its messages are of a version that did not name runs"
            )
            raise errors.NoSuchRunError(
                f"no run of the log is called {wanted!r}: {there}; 'all' stands for all runs"
            )
        return found


def is_run(name: str, wanted: str) -> bool:
    """Whether a run has a wanted name: that name, one that fits the pattern, or any for "all"."""
    return wanted == ALL or name == wanted or fnmatchcase(name, wanted)
