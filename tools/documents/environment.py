"""Writes docs/environment.md from the list of environment variables: `python tools/documents/environment.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from hostcallback.receiver.environment import VARIABLES

FILE = Path(__file__).resolve().parents[2] / "docs" / "environment.md"

TEXT = """\
# Environment variables

Every variable that hostcallback reads. Unset and empty mean the same: the default. A value that is not expected raises
ValueError with the variable's name, what it holds and what is expected. `HOSTCALLBACK_CONTROL_SOCKET` is the exception:
the process logs a warning and opens no socket.

{table}

hostcallback also reads a few variables of other projects: `OTEL_EXPORTER_OTLP_ENDPOINT` (the default endpoint of
`otlp`), `XDG_RUNTIME_DIR` (the folder of the control sockets), `NPROC` (XLA's number of threads) and, when the
native library is compiled, `CXX`.

`python tools/documents/environment.py` writes this page from `receiver/environment.py`.
"""


def document() -> str:
    """The page."""
    rows = [("Variable", "Values", "Default", "Purpose"), ("---",) * 4]
    rows += [(f"`{entry.name}`", entry.expected, entry.default, entry.purpose) for entry in VARIABLES]
    return TEXT.format(table="\n".join(f"| {' | '.join(row)} |" for row in rows))


def main() -> int:
    """Writes it."""
    FILE.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
