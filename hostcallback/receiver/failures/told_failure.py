"""What a process, or its log, tells of its failures: plain data of others, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.text import printable_lines

KINDS = "check", "nonfinite", "tap exception"
MAX_GROUPS = 200
"""Groups of one process that are taken."""

MAX_DEVICES = 256
MAX_TEXT = 1000
MAX_TRACEBACK = 10_000


@dataclass(frozen=True, slots=True)
class ToldFailure:
    """The failures of one kind on one line of one process, since it began."""

    kind: str
    name: str
    source_line: str
    title: str
    values: str
    traceback: str
    by_device: dict[str, int]
    first: float
    last: float


def told_failures(told: Any) -> Iterator[ToldFailure]:
    """Yields the failures in a process's answer; malformed entries are left out."""
    for item in told[:MAX_GROUPS] if isinstance(told, list) else ():
        try:
            yield _failure(item)
        except (LookupError, TypeError, ValueError):
            continue


def _failure(item: Any) -> ToldFailure:
    texts = [item[name] for name in ("kind", "name", "source_line", "title", "values", "traceback")]
    times = [item["first"], item["last"]]
    counts = list(item["by_device"].items()) if isinstance(item["by_device"], dict) else [("", -1)]
    if (
        not all(type(text) is str for text in texts)
        or item["kind"] not in KINDS
        or not all(type(time) in (int, float) and math.isfinite(time) for time in times)
        or not all(type(count) is int and 0 <= count < 2**53 for _, count in counts)
    ):
        raise ValueError("not what a process tells of a failure")
    kind, name, source_line, title, values, traceback = texts
    return ToldFailure(
        kind, name[:MAX_TEXT], source_line[:MAX_TEXT], title[:MAX_TEXT], values[:MAX_TEXT],
        printable_lines(traceback[:MAX_TRACEBACK]), {str(device): count for device, count in counts[:MAX_DEVICES]},
        float(times[0]), float(times[1]),
    )  # fmt: skip
