"""What happens to an emission for which a device's queue has no room."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Policy(enum.StrEnum):
    """Every drop is counted, spends a sequence number, and so shows as a gap."""

    BLOCK = "block"
    """It waits: nothing is lost."""
    BLOCK_THEN_DROP = "block_then_drop"
    """It waits for `timeout_sec`, then it is dropped."""
    DROP_NEWEST = "drop_newest"
    """It is dropped."""
    SAMPLE = "sample"
    """Beyond half full only every `sample_every`-th is kept; one that finds no room is dropped."""
    OVERWRITE_OLDEST = "overwrite_oldest"
    """The oldest messages that wait are dropped to make room. Calls and what is being written are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackPressure:
    """A policy with its parameters.

    Attributes:
        policy: see `Policy`; its value, such as "drop_newest", is taken as well.
        timeout_sec: for BLOCK_THEN_DROP.
        sample_every: for SAMPLE.
    """

    policy: Policy | str = Policy.BLOCK
    timeout_sec: float = 1.0
    sample_every: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError for what is no policy or out of range."""
        try:
            object.__setattr__(self, "policy", Policy(self.policy))
        except ValueError:
            known = ", ".join(repr(policy.value) for policy in Policy)
            raise ValueError(f"unknown back-pressure policy {self.policy!r}: use one of {known}") from None
        if not 0 <= self.timeout_sec < math.inf:
            raise ValueError(
                f"timeout_sec is {self.timeout_sec}, expected a finite number of seconds, 0 or more"
            )
        if self.sample_every < 1:
            raise ValueError(f"sample_every is {self.sample_every}, expected at least 1")
