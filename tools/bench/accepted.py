"""The last accepted figures, in docs/benchmarks/accepted.json, and the rows that have become worse since."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.row import Row

ACCEPTED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "accepted.json"


@dataclass(frozen=True)
class Accepted:
    """What is kept of a row.

    Attributes:
        ratio: ours over the peer.
        spread: half the interquartile range of the ratio, over its median.
    """

    ratio: float
    spread: float

    def is_worse(self, row: Row) -> bool:
        """Whether the row's ratio exceeds this one by more than both spreads."""
        return row.ratio > self.ratio * (1 + self.spread + row.spread)


def _keyed(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    # Rows "the same" belong to the one above them. Some names have a share that was measured.
    last = ""
    for row in rows:
        last = last if row.name == "the same" else row.name
        yield re.sub(r"\d+%", "N%", f"{last} | {row.peer_name}"), row


def load(path: Path = ACCEPTED) -> dict[str, Accepted]:
    """The accepted figures by row and peer; empty if there are none."""
    if not path.exists():
        return {}
    return {key: Accepted(**figures) for key, figures in json.loads(path.read_text(encoding="utf-8")).items()}


def save(rows: Sequence[Row], path: Path = ACCEPTED) -> None:
    """Accepts the figures of these rows."""
    kept = {key: asdict(Accepted(round(row.ratio, 4), round(row.spread, 4))) for key, row in _keyed(rows)}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def changes(
    rows: Sequence[Row], accepted: dict[str, Accepted], *, whole: bool
) -> tuple[list[str], list[str]]:
    """Compares rows with the accepted figures.

    Args:
        rows: as measured now.
        accepted: as `load` returns it.
        whole: whether all rows were measured: those that are missing are named then.

    Returns:
        A line for each row that became worse or is missing, and one for each row that is new.
    """
    worse, new = [], []
    found = dict(_keyed(rows))
    for key, row in found.items():
        before = accepted.get(key)
        if before is None:
            new.append(f"new: {key}: {row.ratio:.2f}")
        elif before.is_worse(row):
            spreads = f"spreads ±{before.spread:.0%} and ±{row.spread:.0%}"
            worse.append(f"WORSE: {key}: {before.ratio:.2f} -> {row.ratio:.2f} ({spreads})")
    if whole:
        worse += [f"MISSING: {key}" for key in accepted if key not in found]
    return worse, new
