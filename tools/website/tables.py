"""Labels the cells of wide tables with the titles of their columns: on a phone each row is then shown as a block."""

from __future__ import annotations

import re
from html import escape, unescape

MOST_COLUMNS = 3
"""Tables with more columns become blocks in narrow windows."""

_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td\b")


def labelled(page: str) -> str:
    """Returns a page of HTML with labels in its wide tables."""
    return _TABLE.sub(_labelled_table, page)


def _labelled_table(table: re.Match[str]) -> str:
    titles = [
        escape(" ".join(unescape(re.sub(r"<[^>]+>", "", title)).split()), quote=True)
        for title in re.findall(r"<th\b[^>]*>(.*?)</th>", table[1], re.DOTALL)
    ]
    if len(titles) <= MOST_COLUMNS:
        return table[0]

    def row(found: re.Match[str]) -> str:
        left = iter(titles)
        return _CELL.sub(lambda cell: f'{cell[0]} data-label="{next(left, "")}"', found[0])

    return f'<table data-columns="{len(titles)}">{_ROW.sub(row, table[1])}</table>'
