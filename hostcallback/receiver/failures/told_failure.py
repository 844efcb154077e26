"""What a process, or its log, tells of its failures: plain data of others, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.failures.steps import Range, merged
from hostcallback.receiver.text import printable_lines

KINDS = "check", "nonfinite", "tap exception"
MAX_GROUPS = 200
"""Groups of one process that are taken."""

MAX_DEVICES = 256
MAX_RANGES = 64
MAX_TEXT = 1000
MAX_TRACEBACK = 10_000


@dataclass(frozen=True, slots=True)
class ToldFailure:
    """The failures of one kind on one line of one process, since it began.

    Attributes:
        steps: ranges of their steps, in increasing order.
        more_steps: number of steps that are not in `steps`.
        without_step: number of failures whose step is not known.
        first_step: of the first failure; None if it is not known.
        last_step: of the last one.
    """

    kind: str
    name: str
    source_line: str
    title: str
    values: str
    traceback: str
    by_device: dict[str, int]
    first: float
    last: float
    steps: list[Range]
    more_steps: int
    without_step: int
    first_step: int | None
    last_step: int | None


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
        or not all(_is_count(count) for _, count in counts)
    ):
        raise ValueError("not what a process tells of a failure")
    kind, name, source_line, title, values, traceback = texts
    return ToldFailure(
        kind, name[:MAX_TEXT], source_line[:MAX_TEXT], title[:MAX_TEXT], values[:MAX_TEXT],
        printable_lines(traceback[:MAX_TRACEBACK]), {str(device): count for device, count in counts[:MAX_DEVICES]},
        float(times[0]), float(times[1]), *_steps(item),
    )  # fmt: skip


def _steps(item: Mapping[str, Any]) -> tuple[list[Range], int, int, int | None, int | None]:
    # Earlier versions told none.
    told, more, without = item.get("steps", []), item.get("more_steps", 0), item.get("without_step", 0)
    first, last = item.get("first_step"), item.get("last_step")
    ranges = [(low, high) for low, high in told[:MAX_RANGES]]
    numbers = [number for each in ranges for number in each]
    if (
        not all(type(step) is int and abs(step) < 2**63 for step in numbers)
        or numbers != sorted(numbers)
        or not all(map(_is_count, (more, without)))
        or not all(step is None or (type(step) is int and abs(step) < 2**63) for step in (first, last))
    ):
        raise ValueError("not what a process tells of steps")
    return merged(ranges), more, without, first, last


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53
