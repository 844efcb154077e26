"""Policies for an emission that finds no room in its device's queue."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Policy(enum.StrEnum):
    """Policy for an emission that finds no room. Dropped emissions are counted, and leave a gap in the numbers."""

    BLOCK = "block"
    """The emission waits: no message is lost."""
    BLOCK_THEN_DROP = "block_then_drop"
    """The emission waits for `timeout_sec`, then it is dropped."""
    DROP_NEWEST = "drop_newest"
    """The emission is dropped."""
    SAMPLE = "sample"
    """In a queue that is more than half full, all but every `sample_every`-th emission are dropped; so is one that
    finds no room."""
    OVERWRITE_OLDEST = "overwrite_oldest"
    """The oldest queued messages are dropped to make room.

    Calls are not, nor unfinished messages: it waits for them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackPressure:
    """A policy with its parameters.

    Attributes:
        policy: see `Policy`; its value, such as "drop_newest", is accepted too.
        timeout_sec: for BLOCK_THEN_DROP.
        sample_every: for SAMPLE.
    """

    policy: Policy | str = Policy.BLOCK
    timeout_sec: float = 1.0
    sample_every: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown policy or a parameter out of range."""
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
