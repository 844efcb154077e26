"""One comparison of our side and a peer, measured in turn in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LIMIT = "the limit"
"""In place of a peer: the figure is compared with an absolute limit."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: the measured quantity.
        unit: of both figures.
        ours: median of ours.
        peer: median of the peer, or the limit.
        peer_name: description of the peer.
        bound: the ratio ours/peer must not exceed; None for a figure that has no bound.
        spread: half the interquartile range of the ratio, over its median; against a limit, that of ours.
        ratio_of_rounds: median of the ratios of rounds, where both sides ran in each round.
    """

    name: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    bound: float | None
    spread: float
    ratio_of_rounds: float | None = None

    @property
    def ratio(self) -> float:
        """Ours over the peer; in a round, where both ran in it: a machine that becomes slower then changes little."""
        return self.ours / self.peer if self.ratio_of_rounds is None else self.ratio_of_rounds

    @property
    def reached(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or self.ratio <= self.bound


@dataclass(frozen=True)
class Figure:
    """A median of several rounds.

    Attributes:
        median: in the unit of the measurement.
        spread: half the interquartile range over the median.
        values: those of the rounds, where the median is of a side that took turns with others.
        turns: the same object for sides that took turns.
    """

    median: float
    spread: float
    values: tuple[float, ...] = ()
    turns: object = None

    def versus(self, peer: Figure, name: str, unit: str, peer_name: str, bound: float | None) -> Row:
        """A row that compares this figure, which is ours, with a peer's.

        The ratio is the median of the rounds' where both took turns, and that of the medians otherwise, also if a
        round's figure of the peer, which may be a difference, is not positive.
        """
        if self.turns is None or self.turns is not peer.turns or min(peer.values) <= 0:
            return Row(name, unit, self.median, peer.median, peer_name, bound, self.spread)
        ratio = figure([mine / theirs for mine, theirs in zip(self.values, peer.values, strict=True)])
        return Row(name, unit, self.median, peer.median, peer_name, bound, ratio.spread, ratio.median)

    def within(self, limit: float, name: str, unit: str, bound: float | None = 1.0) -> Row:
        """A row of this figure and an absolute limit."""
        return Row(name, unit, self.median, limit, LIMIT, bound, self.spread)


def figure(values: Sequence[float]) -> Figure:
    """Of the same thing measured several times."""
    low, median, high = statistics.quantiles(values, n=4)
    return Figure(median, (high - low) / 2 / abs(median) if median else 0.0)


def measure(sides: Sequence[Callable[[], float]], rounds: int) -> list[Figure]:
    """Runs the sides in turn for `rounds` rounds, after one warm-up round."""

    def once() -> list[float]:
        return [side() for side in sides]

    return measure_together(once, rounds)


def measure_together(once: Callable[[], Sequence[float]], rounds: int) -> list[Figure]:
    """As `measure`, for sides that take turns within a round: `once` returns a figure for each."""
    once()  # compiled and warm
    turns, found = object(), [once() for _ in range(rounds)]
    return [replace(figure(values), values=values, turns=turns) for values in zip(*found, strict=True)]


def compare(
    name: str,
    unit: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    peer_name: str,
    bound: float | None,
    rounds: int,
) -> Row:
    """Runs both sides in turn; each returns its time in `unit`."""
    mine, theirs = measure([ours, peer], rounds)
    return mine.versus(theirs, name, unit, peer_name, bound)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| what | ours | spread of the ratio | peer or limit | its figure | ratio | must be at most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = (
            f"{row.ours:.2f} {row.unit} | ±{row.spread:.0%} | {row.peer_name} | {row.peer:.2f} {row.unit}"
        )
        bound = "-" if row.bound is None else f"1/{1 / row.bound:.0f}" if row.bound < 1 else f"{row.bound:g}"
        ratio = f"1/{1 / row.ratio:.1f}" if 0 < row.ratio < 0.7 else f"{row.ratio:.2f}"
        verdict = "" if row.bound is None else "reached" if row.reached else "MISSED"
        lines.append(f"| {row.name} | {figures} | {ratio} | {bound} | {verdict} |")
    return "\n".join(lines)
