"""Reports patterns that match no tap, or no device, of a log."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from hostcallback.receiver.tap_name import matches
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.terminal import printable


def report_unmatched(reader: LogReader, wanted: Selection) -> int:
    """Reports on standard error which patterns match no tap or device of a log; returns the exit status."""
    taps = reader.tap_names() if wanted.names else set()
    devices = {name for _, name in reader.devices()} if wanted.devices else set()
    return report_unmatched_names(wanted, taps, devices)


def report_unmatched_names(wanted: Selection, taps: Collection[str], devices: Collection[str]) -> int:
    """As `report_unmatched`, for what is called as these taps and devices."""
    status = _report("tap", wanted.names, sorted(taps))
    return _report("device", wanted.devices, sorted(devices)) or status


def _report(kind: str, patterns: Sequence[str], names: Sequence[str]) -> int:
    status = 0
    for pattern in patterns:
        if any((matches if kind == "tap" else fnmatchcase)(name, pattern) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=3) or names[:3]
        others = f"; there are {', '.join(printable(repr(name)) for name in near)}" if near else ""
        print(f"hcb: no {kind} of the log is called {printable(repr(pattern))}{others}", file=sys.stderr)
        status = 1
    return status
