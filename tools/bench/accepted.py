"""The last accepted figures, in docs/benchmarks/accepted.json, and the rows that have become worse since.

A ratio to a peer that took turns carries over to another machine; a time compared with a limit does not. Machines here
differ by a factor of two and more, so the peers' times tell how much slower this one is than the machine of the
accepted figures: nothing of ours is in them. Times with a limit may be as much longer. The file keeps the figures of
one machine, to which those of others are converted; `--rebase` takes the machine of this run.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.row import LIMIT, Row

ACCEPTED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "accepted.json"

FEWEST_PEERS = 8
"""With fewer peers than this, as in a run of single rows, nothing is known of the machine."""

SAME = 1.15
"""Up to this factor the machine is taken to be the same: so much do runs of one machine differ."""


@dataclass(frozen=True)
class Accepted:
    """What is kept of a row.

    Attributes:
        ratio: ours over the peer.
        spread: half the interquartile range of the ratio, over its median.
        peer: the peer's time, in the row's unit; None for a limit, or what is no time.
    """

    ratio: float
    spread: float
    peer: float | None = None

    def is_worse(self, row: Row, slowdown: float) -> bool:
        """Whether the row's ratio exceeds this one by more than both spreads.

        Args:
            row: as measured now.
            slowdown: how much longer the machine takes, for a time with a limit.
        """
        scale = max(1.0, slowdown) if _is_limited_time(row) else 1.0
        return row.ratio > self.ratio * scale * (1 + self.spread + row.spread)


def _is_time(row: Row) -> bool:
    return row.unit.partition("/")[0] in ("ns", "us", "ms", "s", "% of a core")


def _is_limited_time(row: Row) -> bool:
    return row.peer_name == LIMIT and _is_time(row)


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


def slowdown(rows: Sequence[Row], accepted: Mapping[str, Accepted]) -> float:
    """How many times as long this machine takes for the peers' work, by the upper quartile; 1 for the same machine.

    The quartile, because peers that wait, for a disk or another thread, take the same on every machine.
    """
    now = dict(_keyed(rows))
    times = [
        now[key].peer / before.peer
        for key, before in accepted.items()
        if key in now and before.peer is not None and min(before.peer, now[key].peer) > 0
    ]
    if len(times) < FEWEST_PEERS:
        return 1.0
    factor = statistics.quantiles(times, n=4)[2]
    return 1.0 if 1 / SAME < factor < SAME else factor


def save(rows: Sequence[Row], path: Path = ACCEPTED, *, rebase: bool = False) -> None:
    """Accepts the figures of these rows.

    Of another machine, times with a limit that did not become worse are lowered at most, and the peers' times stay:
    such a run must not make the guard weaker.

    Args:
        rows: as measured now.
        path: the file.
        rebase: whether the figures of this machine replace those of the last one.
    """
    before = {} if rebase else load(path)
    factor = slowdown(rows, before)
    kept: dict[str, Accepted] = {}
    for key, row in _keyed(rows):
        last = before.get(key) if factor != 1 else None
        ratio, peer = row.ratio, None
        if _is_limited_time(row):
            ratio = row.ratio / factor
            if last and not last.is_worse(row, factor):
                ratio = min(last.ratio, row.ratio / min(1.0, factor))
        elif row.peer_name != LIMIT and _is_time(row):
            peer = last.peer if last and last.peer else row.peer / factor
        kept[key] = Accepted(ratio, row.spread, peer)
    text = {key: {name: _rounded(value) for name, value in asdict(row).items()} for key, row in kept.items()}
    path.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def changes(
    rows: Sequence[Row], accepted: Mapping[str, Accepted], *, whole: bool
) -> tuple[list[str], list[str]]:
    """Compares rows with the accepted figures.

    Args:
        rows: as measured now.
        accepted: as `load` returns it.
        whole: whether all rows were measured: those that are missing are named then.

    Returns:
        A line for each row that became worse or is missing, and one for each row that is new, after a line that says
        how much slower or faster the machine is, if it is another one.
    """
    worse, new = [], []
    found = dict(_keyed(rows))
    factor = slowdown(rows, accepted)
    if factor != 1:
        new.append(
            f"this machine takes {factor:.2f} times as long for the peers' work; so may times with a limit"
        )
    for key, row in found.items():
        before = accepted.get(key)
        if before is None:
            new.append(f"new: {key}: {row.ratio:.2f}")
        elif before.is_worse(row, factor):
            spreads = f"spreads ±{before.spread:.0%} and ±{row.spread:.0%}"
            worse.append(f"WORSE: {key}: {before.ratio:.2f} -> {row.ratio:.2f} ({spreads})")
    if whole:
        worse += [f"MISSING: {key}" for key in accepted if key not in found]
    return worse, new
