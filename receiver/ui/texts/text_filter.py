"""Which lines of the stream of texts are wanted."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from hostcallback.receiver.terminal import printable
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

SHOWN = "print", "log", "warning", "error", "progress"
"""What a client may ask for: printed texts, log records, log records from WARNING on with failures, from ERROR on with
failures, progress."""

FAILURES = "check", "nonfinite"


class TextFilter(NamedTuple):
    """What a line has to be like. Empty and None allow everything.

    Attributes:
        search: text that a line or its tap's name contains, in any case.
        run: name of the run.
        show: one of `SHOWN`.
        process: as lines name it.
        device: as lines name it.
        place: text that the source line contains, such as `train.py:31`.
        first_step: smallest step; lines without a step are left out.
        last_step: largest step.
    """

    search: str = ""
    run: str = ""
    show: str | None = None
    process: str = ""
    device: str = ""
    place: str = ""
    first_step: float | None = None
    last_step: float | None = None

    @property
    def has_steps(self) -> bool:
        """Whether it bounds the steps."""
        return self.first_step is not None or self.last_step is not None

    @property
    def steps(self) -> tuple[float, float]:
        """Smallest and largest step."""
        low = float("-inf") if self.first_step is None else self.first_step
        return low, float("inf") if self.last_step is None else self.last_step

    def allows_sender(self, process: str, device: str) -> bool:
        """Whether lines of a device of a process are wanted."""
        return (not self.process or process == self.process) and (not self.device or device == self.device)

    def allows_tap(self, described: TapDescriptor) -> bool:
        """Whether lines of a tap are wanted, by its kind, level and source line."""
        if self.place and not _has_place(printable(described.source_line), self.place):
            return False
        level = level_of(described)
        if self.show is None or self.show == level:
            return True
        is_log = level not in ("print", "progress", *FAILURES)
        if self.show == "log":
            return is_log
        if self.show in ("warning", "error"):
            least = logging.WARNING if self.show == "warning" else logging.ERROR
            return level in FAILURES or (is_log and _number(described) >= least)
        return False

    def allows_line(self, line: dict[str, Any]) -> bool:
        """Whether a line of an allowed sender and tap is wanted: by its step and its text."""
        low, high = self.steps
        if self.has_steps and (line["step"] is None or not low <= line["step"] <= high):
            return False
        search = self.search.casefold()
        return not search or search in line["text"].casefold() or search in line["tap"].casefold()


def _has_place(line: str, wanted: str) -> bool:
    # The line 31 is not the line 310.
    at = line.find(wanted)
    while at >= 0:
        if not (wanted[-1].isdigit() and line[at + len(wanted) :][:1].isdigit()):
            return True
        at = line.find(wanted, at + 1)
    return False


def level_of(described: TapDescriptor) -> str:
    """What a tap's lines are: "print", "progress", "check", "nonfinite", or a log level such as "warning"."""
    if described.tap_kind.is_check:
        return "nonfinite" if described.kind == "nonfinite" else "check"
    if described.kind == "progress":
        return "progress"
    return "print" if "level" not in described.params else _name(_number(described))


def _number(described: TapDescriptor) -> int:
    found = described.params.get("level")
    return found if type(found) is int else logging.INFO


def _name(level: int) -> str:
    known = {number: name.lower() for name, number in logging.getLevelNamesMapping().items() if number}
    return known.get(level, f"level {level}"[:30])
