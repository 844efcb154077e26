"""One comparison of ours and a peer, measured in turn in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what is measured.
        unit: of both figures.
        ours: median of ours.
        peer: median of the peer, or the limit.
        peer_name: what the peer is.
        bound: the ratio ours/peer must not exceed; None for a figure that has no bound yet.
        spread: half the interquartile range of ours, over its median.
    """

    name: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    bound: float | None
    spread: float

    @property
    def ratio(self) -> float:
        """Ours over the peer."""
        return self.ours / self.peer

    @property
    def reached(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or self.ratio <= self.bound


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
    ours(), peer()  # compiled and warm
    pairs = [(ours(), peer()) for _ in range(rounds)]
    mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    low, _, high = statistics.quantiles(mine, n=4)
    median = statistics.median(mine)
    return Row(name, unit, median, statistics.median(theirs), peer_name, bound, (high - low) / 2 / median)
