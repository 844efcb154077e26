"""Writes the table of what ran into docs/accelerate.md, from the comparisons that were stored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.upstream.differences import DOCUMENT, Comparison, Difference, read_explained
from tools.upstream.settings import ACCELERATED, LOADED, PLAIN

RAN = re.compile(r"(<!-- upstream ran -->\n).*?(<!-- end -->)", re.DOTALL)
FILE = "comparison.json"


def store(comparison: Comparison, folder: Path) -> None:
    """Stores what was found for one library."""
    (folder / FILE).write_text(json.dumps(asdict(comparison)), encoding="utf-8")


def read_stored(folder: Path) -> Comparison | None:
    """What was found for one library, or None if its tests have not run to the end."""
    file = folder / FILE
    if not file.exists():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    stored["differences"] = [Difference(*found) for found in stored["differences"]]
    stored["in_company"] = [(test, setting) for test, setting in stored["in_company"]]
    return Comparison(**stored)


def table(comparisons: Sequence[Comparison]) -> str:
    """A row per library: how many tests ran and passed plain, and how many differ in the other settings."""
    lines = [
        "| library | tests | passed | differ loaded | differ accelerated | differ among others, not alone |",
        "|---|---|---|---|---|---|",
    ]
    rows = read_explained()
    for found in comparisons:
        ran = PLAIN if PLAIN in found.counts else ACCELERATED
        counts: Mapping[str, int] = found.counts[ran]
        passed = f"{counts.get('passed', 0)}{'' if ran == PLAIN else ', accelerated'}"
        cells = [f"{found.library} {found.version}", sum(counts.values()), passed]
        for setting in (LOADED, ACCELERATED):
            of_setting = [difference for difference in found.differences if difference.setting == setting]
            explained = sum(
                any(row.covers(found.library, difference.test, setting) for row in rows)
                for difference in of_setting
            )
            cells.append(f"{len(of_setting)}, {explained} explained" if of_setting else 0)
        cells.append(len(found.in_company))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def write(comparisons: Sequence[Comparison], document: Path = DOCUMENT) -> None:
    """Replaces the table in the document."""
    text = document.read_text(encoding="utf-8")
    document.write_text(
        RAN.sub(lambda found: found[1] + table(comparisons) + found[2], text), encoding="utf-8"
    )
