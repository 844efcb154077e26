"""Writes the limits of receiver/limits.py into docs/security.md: `python tools/documents/limits.py`."""

from __future__ import annotations

from pathlib import Path

from hostcallback.receiver.limits import LIMITS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- limits -->\n", "<!-- end of limits -->"


def table() -> str:
    """The limits as a table."""
    lines = ["| Limit | Value | Of what |", "|---|---|---|"]
    lines += [f"| `{limit.name}` | {limit.value:,} | {limit.reason} |" for limit in LIMITS]
    return "\n".join(lines) + "\n"


def documented(text: str) -> str:
    """The document with the limits of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
