"""The runs of logs for readers: what to call them, their configuration, and a table of their metrics."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from itertools import takewhile
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.configurations import Settings, differing_settings, flat
from hostcallback.receiver.taplog.reading.logged_message import process_of
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index.buckets import MAX, MIN
from hostcallback.receiver.ui.index.log_files import Segment
from hostcallback.receiver.ui.index.log_index import LogIndex, run_of

MAX_METRICS = 500
"""Numbers of a run that the table has."""

LONG_VALUE = 16
NOTES = "notes"
"""The setting that is a text for readers. It and long values name no run."""

LONG_NAME = 24
"""Characters of a name beyond which what it has in common with all others is left out."""

_MADE = re.compile(r"(.+)-[^-]*-\d{8}T\d{6}-[0-9a-f]{6}")
"""A name that was made: program, user, time and a random number."""


def runs(index: LogIndex) -> dict[str, list[Segment]]:
    """The segments of each run. Under the index's lock."""
    found: dict[str, list[Segment]] = {}
    for segment in index.files.segments:
        found.setdefault(run_of(segment), []).append(segment)
    return found


def settings(segments: list[Segment]) -> Settings:
    """The configuration of a run: that of its last start, of its first process."""
    configured = [segment for segment in segments if isinstance(segment.config, dict)]
    last = max(
        configured, key=lambda segment: (-process_of(segment.writer), segment.created_ns), default=None
    )
    return {} if last is None else flat(last.config)


def names(of_runs: dict[str, list[Segment]]) -> dict[str, str]:
    """What to call each run: the name that was chosen, or its folder's, or what differs, or when it began."""
    folders = {run: {segment.path.parent.name for segment in segments} for run, segments in of_runs.items()}
    shared = Counter(folder for found in folders.values() for folder in found)
    configured = {run: settings(segments) for run, segments in of_runs.items()}
    differing = differing_settings(list(configured.values()))
    found: dict[str, str] = {}
    for run, segments in of_runs.items():
        made = _MADE.fullmatch(run)
        (folder, *others) = folders[run]
        differs = {name: str(configured[run][name]) for name in differing if name in configured[run]}
        told = [
            f"{name}={value}" for name, value in differs.items() if len(value) <= LONG_VALUE and name != NOTES
        ]
        if made is None:
            found[run] = run
        elif len(of_runs) > 1 and not others and shared[folder] == 1:
            found[run] = folder
        elif told:
            found[run] = ", ".join(told[:3])
        else:
            began = datetime.fromtimestamp(min(segment.created_ns for segment in segments) / 1e9)
            found[run] = f"{made[1]} {began:%b %d %H:%M:%S}"
    return _told_apart(found)


def _told_apart(found: dict[str, str]) -> dict[str, str]:
    # Long names lose what they have in common, and equal ones get the end of the run's own name.
    long = [name for name in found.values() if len(name) > LONG_NAME]
    alike = takewhile(lambda at: len({*at}) == 1, zip(*long, strict=False)) if len(long) > 1 else ()
    common = "".join(letters[0] for letters in alike)
    cut = max(common.rfind(mark) + 1 for mark in "-_ /")
    short = {
        run: "…" + name[cut:] if cut > 3 and len(name) > LONG_NAME else name for run, name in found.items()
    }
    times = Counter(short.values())
    return {run: printable(name if times[name] == 1 else f"{name} {run[-6:]}") for run, name in short.items()}


def table(index: LogIndex) -> dict[str, Any]:
    """The configuration of each run, and the last, smallest and largest value of each of its numbers."""
    with index.lock:
        of_runs = runs(index)
        metrics: dict[str, dict[str, list[float | None]]] = {run: {} for run in of_runs}
        for tap in index.taps.rows:
            found = metrics.get(tap.run)
            if tap.kind == "scalar" and tap.count and found is not None and len(found) < MAX_METRICS:
                rows = tap.buckets.rows
                least, most = rows[:, MIN].min(initial=np.inf), rows[:, MAX].max(initial=-np.inf)
                title = f"|{tap.title}|" if tap.is_complex else tap.title
                found[printable(title)] = [_finite(tap.last), _finite(least), _finite(most)]
    configured = {run: settings(segments) for run, segments in of_runs.items()}
    return {
        "runs": [{"id": run, "config": configured[run], "metrics": metrics[run]} for run in of_runs],
        "differing": differing_settings(list(configured.values())),
    }


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
