"""The difference of two runs for the page: where they first part, and how far each tap is off."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.printing import place_text
from hostcallback.receiver.taplog.configurations import differing_settings
from hostcallback.receiver.taplog.diff.comparison import Comparison, Difference, Tolerance
from hostcallback.receiver.taplog.diff.pairing import ComparedLog
from hostcallback.receiver.taplog.reading.merge import Record
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render import short_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.index.runs import runs, settings

BUDGET_SEC = 20.0
"""A comparison that takes longer ends with what it has found."""

MAX_TAPS = 500
MAX_POINTS = 1000
"""Differences of a tap that the page gets; of more, the largest of each part."""

VALUE_CHARS = 300


class _OverBudgetError(Exception):
    pass


@dataclass(slots=True)
class _TapDifference:
    # The differences of one tap.
    differing: int = 0
    missing: int = 0
    first_step: int | None = None
    max_abs: float | None = None
    x: array[float] = field(default_factory=lambda: array("d"))
    difference: array[float] = field(default_factory=lambda: array("d"))

    def add(self, found: Difference) -> None:
        step = found.logged.step
        if found.a is None or found.b is None:
            self.missing += 1
            return
        self.differing += 1
        if step is not None and (self.first_step is None or step < self.first_step):
            self.first_step = step
        sizes = [leaf.found.max_absolute for leaf in found.found.leaves]
        size = max((float(each) for each in sizes if np.isfinite(each)), default=None)
        if size is None:
            return
        self.max_abs = size if self.max_abs is None else max(self.max_abs, size)
        self.x.append(float(self.differing if step is None else step))
        self.difference.append(size)

    def points(self) -> tuple[list[float], list[float]]:
        # In the order of the steps, whatever device they are of; of many, the largest of each part.
        x, size = np.array(self.x), np.array(self.difference)
        order = np.argsort(x, kind="stable")
        x, size = x[order], size[order]
        if not len(x):
            return [], []
        cells = (
            x if len(np.unique(x)) <= MAX_POINTS else np.floor((x - x[0]) / (x[-1] - x[0]) * (MAX_POINTS - 1))
        )
        starts = np.append(0, np.flatnonzero(np.diff(cells)) + 1)
        return x[starts].tolist(), np.maximum.reduceat(size, starts).tolist()


def difference(index: LogIndex, left: str, right: str, tolerance: Tolerance) -> dict[str, Any]:
    """Compares the messages of two runs, tap by tap and regardless of source lines.

    Raises:
        TapLogError: a log cannot be read.
    """
    ends = time.monotonic() + BUDGET_SEC
    with index.lock:
        sides = [runs(index)[name] for name in (left, right)]
    paths = [[segment.path for segment in side] for side in sides]
    configured = [settings(side) for side in sides]
    a, b = (ComparedLog(part, ignore_lines=True) for part in paths)

    def within_budget(selection: Selection, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if time.monotonic() > ends:
                raise _OverBudgetError
            yield record

    a.reader.watch = b.reader.watch = within_budget
    comparison = Comparison(a, b, tolerance, Selection())
    taps: dict[str, _TapDifference] = {}
    first: Difference | None = None
    notes: list[str] = []
    try:
        for found in comparison.all():
            name = found.logged.message.consumer.name
            if name in taps or len(taps) < MAX_TAPS:
                taps.setdefault(name, _TapDifference()).add(found)
            if first is None or found.logged.message.time_ns < first.logged.message.time_ns:
                first = found
    except _OverBudgetError:
        notes.append(f"only the beginning was compared: the comparison took more than {BUDGET_SEC:g} s")
    notes += _notes(comparison)
    is_equal = not taps and not notes
    if comparison.outcome.by_clock:
        notes.append(comparison.outcome.left_out_text)
    return {
        "equal": is_equal,
        "first": None if first is None else _first(first),
        "taps": _taps(comparison, taps),
        "config": {name: [side.get(name) for side in configured] for name in differing_settings(configured)},
        "notes": [printable(note) for note in notes],
    }


def _taps(comparison: Comparison, taps: dict[str, _TapDifference]) -> list[dict[str, Any]]:
    compared = comparison.outcome.by_tap
    more: Counter[str] = Counter()
    for (_, key), count in comparison.outcome.more.items():
        more[key[0]] += count
    names = sorted({*taps, *list(compared)[:MAX_TAPS]}, key=lambda name: (name not in taps, name))
    found = []
    for name in names:
        tap = taps.get(name) or _TapDifference()
        x, sizes = tap.points()
        found.append(
            {
                "name": printable(name),
                "compared": compared[name],
                "differing": tap.differing,
                "missing": tap.missing + more[name],
                "first_step": tap.first_step,
                "max_abs": tap.max_abs,
                "x": x,
                "difference": sizes,
            }
        )
    return found


def _first(found: Difference) -> dict[str, Any]:
    consumer = found.logged.message.consumer
    leaf = found.found.leaves[0] if found.found.leaves else None
    places = map(place_text, found.logged.message.shard_index or ())
    return {
        "tap": printable(consumer.name),
        "leaf": printable(found.found.leaf if leaf is None else leaf.leaf),
        "step": found.logged.step,
        "place": printable(consumer.source_line),
        "device": printable(" ".join([found.device.device, *places])),
        "text": printable(found.found.text)[:VALUE_CHARS],
        "left": _side(found, 0),
        "right": _side(found, 1),
    }


def _side(found: Difference, number: int) -> str:
    # What the first difference is in the left log (0), or in the right one (1).
    if (found.a, found.b)[number] is None:
        return "(no message)"
    if found.found.leaves:
        leaf = found.found.leaves[0]
        return short_text((leaf.a, leaf.b)[number], VALUE_CHARS)
    if found.found.sides is not None:
        return printable(found.found.sides[number])[:VALUE_CHARS]
    return "(a message)" if None in (found.a, found.b) else ""


def _notes(comparison: Comparison) -> list[str]:
    outcome = comparison.outcome
    notes = [
        f"{device.device} of process {device.process}: not compared to the end, because earlier messages were lost"
        for device, _ in outcome.unaligned[:20]
    ]
    if outcome.passed_over:
        notes.append(
            f"{outcome.passed_over:,} message(s) not compared: their counterparts were dropped, damaged or folded"
        )
    if not outcome.compared:
        notes.append("no message of one run has a counterpart in the other")
    return notes
