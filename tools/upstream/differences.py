"""Compares outcomes by test, and knows the differences that docs/accelerate.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.upstream.settings import ACCELERATED, LOADED, PLAIN, ROOT, SETTINGS, Outcome

DOCUMENT = ROOT / "docs" / "accelerate.md"
EXPLAINED = re.compile(r"<!-- upstream explained -->\n(.*?)<!-- end -->", re.DOTALL)


class Explained(NamedTuple):
    """A row of the table of explained differences."""

    library: str
    test: str
    setting: str
    reason: str

    def covers(self, library: str, test: str, setting: str) -> bool:
        """Whether the row names this test: by its id, or by the part of it before the parameters."""
        return (library, setting) == (self.library, self.setting) and self.test in (
            test,
            test.partition("[")[0],
        )


class Difference(NamedTuple):
    """A test that passes plain and not in a setting, also alone."""

    library: str
    test: str
    setting: str
    outcome: str
    text: str


@dataclass
class Comparison:
    """What was found for one library.

    Attributes:
        library: its name.
        version: its version.
        counts: per setting, how many tests had which outcome.
        differences: the tests that fail in a setting only.
        in_company: the tests that failed in a setting, but pass alone, with the setting.
    """

    library: str
    version: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    in_company: list[tuple[str, str]] = field(default_factory=list)


def read_explained(path: Path = DOCUMENT) -> list[Explained]:
    """The rows of the table in docs/accelerate.md.

    Raises:
        ValueError: a row has no test, setting or reason.
    """
    tables = EXPLAINED.findall(path.read_text(encoding="utf-8"))
    rows = [line for table in tables for line in table.splitlines()[2:] if line.startswith("|")]
    found = []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) != 4 or not all(cells) or cells[2] not in (LOADED, ACCELERATED):
            raise ValueError(
                f"{path.name} explains a difference by the row {row!r}, expected "
                f"| library | `test` | {LOADED} or {ACCELERATED} | reason |"
            )
        found.append(Explained(cells[0], cells[1].strip("`"), cells[2], cells[3]))
    return found


def suspects(outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[tuple[str, str]]:
    """The tests that pass plain and not in a setting, with the setting. A test that did not run there is one too.

    If none ran plain: the tests that ended neither as passed nor as skipped.
    """
    if PLAIN not in outcomes:
        return [
            (test, setting)
            for setting, found in outcomes.items()
            for test, outcome in found.items()
            if outcome.outcome not in ("passed", "skipped")
        ]
    passed = [test for test, outcome in outcomes[PLAIN].items() if outcome.outcome == "passed"]
    return [
        (test, setting)
        for test in passed
        for setting in SETTINGS[1:]
        if (found := outcomes[setting].get(test)) is None or found.outcome != "passed"
    ]


def count(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many outcomes there are of each kind."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.outcome] = counts.get(outcome.outcome, 0) + 1
    return counts
