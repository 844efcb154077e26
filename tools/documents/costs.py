"""Writes the measured figures of docs/benchmarks.md into the documents: `python tools/documents/costs.py`.

A document marks a figure with two comments, which readers do not see:

    takes <!-- bench: scalar tap in a scan, delivered to a Python function; ours -->0.98 us<!-- end --> a message

The first names a row of the table by the start of its name, the figure, and if several rows fit, the start of the peer.
The figures: `ours` and `peer` are times; `ratio` is that of the row, ours over the peer's, and `faster` its inverse.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "benchmarks.md"
MARK = re.compile(r"(<!-- bench: ([^>]*?) -->)(.*?)(<!-- end -->)", re.DOTALL)


class Cost(NamedTuple):
    """A row of the table: what was measured, both times with their unit, and the ratio of the row."""

    name: str
    ours: str
    peer_name: str
    peer: str
    ratio: float


def read_costs(report: str) -> list[Cost]:
    """Returns the rows of the page of benchmarks. A row called "the same" gets the name of the row before."""
    costs: list[Cost] = []
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 8 and re.match(r"-?[\d.]+ \S", cells[1]):
            name, ours, _, peer_name, peer, text, *_ = cells
            ratio = 1 / float(text[2:]) if text.startswith("1/") else float(text)
            costs.append(Cost(costs[-1].name if name == "the same" else name, ours, peer_name, peer, ratio))
    return costs


def figure(mark: str, costs: Sequence[Cost]) -> str:
    """Returns the text for a mark such as `latency from emission; ours`.

    Raises:
        ValueError: no row, or more than one, is meant, or the figure is unknown.
    """
    name, kind, peer = (*map(str.strip, mark.split(";")), "", "")[:3]
    found = [cost for cost in costs if cost.name.startswith(name) and cost.peer_name.startswith(peer)]
    if len(found) != 1:
        raise ValueError(
            f"{mark!r} means {len(found)} rows of {REPORT.name}, expected one: {[c[:3] for c in found]}"
        )
    units = {"ours": found[0].ours, "peer": found[0].peer}
    if kind in units:
        number, _, unit = units[kind].partition(" ")
        return f"{rounded(float(number))} {unit.partition('/')[0]}"
    if kind == "ratio":
        return rounded(found[0].ratio)
    if kind == "faster":
        return rounded(1 / found[0].ratio)
    raise ValueError(f"{mark!r}: the figure is {kind!r}, expected ours, peer, ratio or faster")


def rounded(number: float) -> str:
    """A number with two significant digits."""
    text = f"{number:.2g}"
    return f"{float(text):.0f}" if "e" in text else text


def filled(text: str, costs: Sequence[Cost]) -> str:
    """Returns a document with the figures of now."""
    return MARK.sub(lambda mark: f"{mark[1]}{figure(mark[2], costs)}{mark[4]}", text)


def documents() -> list[Path]:
    """The documents that may have marks."""
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path != REPORT)]


def main() -> int:
    """Writes the documents whose figures have changed."""
    costs = read_costs(REPORT.read_text(encoding="utf-8"))
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = filled(before, costs)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
