"""Chooses one of the runs that are in a folder of tap logs: the last one, or those of a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hostcallback.receiver.taplog.format.errors import NoSuchRunError

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
        found = {name for name in names if matches(name, wanted)}
        if not found:
            raise NoSuchRunError(_no_such_run(wanted, names))
        return found


def matches(name: str, wanted: str) -> bool:
    """Whether a run has a wanted name: that name, one that fits the pattern, or any for "all"."""
    return wanted == ALL or name == wanted or fnmatchcase(name, wanted)


def _no_such_run(wanted: str, names: Iterable[str]) -> str:
    named = [name for name in names if name]
    near = difflib.get_close_matches(wanted, named, n=3) or named[-5:]
    there = f"there are {', '.join(near)}" if near else "its messages are of a version that did not name runs"
    return f"no run of the log is called {wanted!r}: {there}; 'all' stands for all runs"
