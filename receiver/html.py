"""HTML for notebooks; every text in it is escaped."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from hostcallback.receiver.terminal import printable_lines


def preformatted(text: str) -> str:
    """Returns a text as HTML that shows it line by line. Control characters and markup in it have no effect."""
    return f"<pre>{html.escape(printable_lines(text))}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """Returns an HTML table, with a row of heads and the texts of the cells."""
    lines = [f"<caption>{_cell(caption)}</caption>"] if caption else []
    lines.append("<tr>" + "".join(f"<th>{_cell(name)}</th>" for name in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def _cell(value: Any) -> str:
    return html.escape(printable_lines(str(value)))


def array(value: Any) -> str:
    """Returns an array as HTML: by treescope if that is installed, else as its text."""
    try:
        treescope = importlib.import_module("treescope")
    except ImportError:
        return preformatted(repr(value))
    return str(treescope.render_to_html(value, ignore_exceptions=True, compressed=True))
