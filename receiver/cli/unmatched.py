"""Says so when no tap of a log has the name that was asked for."""

from __future__ import annotations

import difflib
import sys

from receiver.taplog.plain_value import printable
from receiver.taplog.reader import LogReader
from receiver.taplog.selection import Selection


def report_unmatched(reader: LogReader, wanted: Selection) -> int:
    """Says on standard error which patterns match no tap, where no message was found; returns the exit status."""
    if not wanted.names:
        return 0
    names = sorted(reader.tap_names())
    status = 0
    for pattern in wanted.names:
        if any(Selection((pattern,)).wants_name(name) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=3) or names[:3]
        others = f"; there are {', '.join(printable(repr(name)) for name in near)}" if near else ""
        print(f"hcb: no tap of the log is called {printable(repr(pattern))}{others}", file=sys.stderr)
        status = 1
    return status
