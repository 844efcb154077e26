"""Writes the limits of receiver/limits.py into docs/security.md: `python tools/documents/limits.py`."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

from hostcallback.receiver import limits

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- limits -->\n", "<!-- end of limits -->"


def reasons() -> dict[str, str]:
    """What each limit is of: the text below it in the module, which begins with a capital and ends with a full stop."""
    body = ast.parse(Path(limits.__file__).read_text(encoding="utf-8")).body
    found = {}
    for limit, text in itertools.pairwise(body):
        match limit, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(reason))):
                found[name] = reason[0].lower() + " ".join(reason[1:].split()).removesuffix(".")
    return found


def table() -> str:
    """The limits as a table."""
    lines = ["| Limit | Value | Of what |", "|---|---|---|"]
    lines += [f"| `{name}` | {getattr(limits, name):,} | {reason} |" for name, reason in reasons().items()]
    return "\n".join(lines) + "\n"


def documented(text: str) -> str:
    """The document with the limits of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
