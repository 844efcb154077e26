"""Policies for an emission that finds no room in its device's queue.

A policy is a row of `_RULES`: how long an emission waits for room, and which steps come before that. The native ring
carries out the same rules (`Ring::Emit`); `admit` is the reference, and what queues in Python use.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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


class Step(enum.IntFlag):
    """A step before the wait for room. The numbers are those of `hcb_admission_step` in native code."""

    SAMPLE_BEYOND_HALF = 1
    """In a queue that is more than half full, all but every `sample_every`-th emission are dropped."""
    OVERWRITE_OLDEST = 2
    """The oldest messages are dropped to make room, as far as they may be."""
    LEAVE_OUT = 4
    """Every emission is dropped, also where there is room. No policy has it; see `Source.leave_out`."""


class Wait(enum.Enum):
    """How long an emission waits for room. Then it is dropped."""

    FOREVER = enum.auto()
    FOR_TIMEOUT = enum.auto()
    NEVER = enum.auto()


class _Rule(NamedTuple):
    wait: Wait
    steps: Step = Step(0)


_RULES = {
    Policy.BLOCK: _Rule(Wait.FOREVER),
    Policy.BLOCK_THEN_DROP: _Rule(Wait.FOR_TIMEOUT),
    Policy.DROP_NEWEST: _Rule(Wait.NEVER),
    Policy.SAMPLE: _Rule(Wait.NEVER, Step.SAMPLE_BEYOND_HALF),
    Policy.OVERWRITE_OLDEST: _Rule(Wait.FOREVER, Step.OVERWRITE_OLDEST),
}


class Admission(NamedTuple):
    """What a queue does with an emission.

    Attributes:
        wait_sec: how long it waits for room before it is dropped; None for without limit.
        steps: what comes before the wait.
        sample_every: for SAMPLE_BEYOND_HALF.
    """

    wait_sec: float | None
    steps: Step
    sample_every: int


class BoundedQueue(Protocol):
    """A queue to which `admit` applies a policy. The caller holds its lock, except during the wait."""

    @property
    def next_seq(self) -> int:
        """Number of the next emission."""

    def has_room(self) -> bool:
        """Whether an emission may be queued."""

    def is_beyond_half(self) -> bool:
        """Whether the queue is more than half full."""

    def overwrite_oldest(self) -> None:
        """Drops the oldest messages until there is room, or the next one must not be dropped."""

    def wait_for_room(self, timeout_sec: float | None) -> bool:
        """Waits until there is room; returns whether there is."""


def admit(queue: BoundedQueue, admission: Admission) -> bool:
    """Returns whether an emission is queued; False if it is dropped."""
    steps = admission.steps
    if steps & Step.SAMPLE_BEYOND_HALF and queue.is_beyond_half() and queue.next_seq % admission.sample_every:
        return False
    if queue.has_room():
        return True
    if steps & Step.OVERWRITE_OLDEST:
        queue.overwrite_oldest()
        if queue.has_room():
            return True
    return admission.wait_sec != 0 and queue.wait_for_room(admission.wait_sec)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackPressure:
    """A policy with its parameters.

    Attributes:
        policy: "block", "block_then_drop", "drop_newest", "sample" or "overwrite_oldest"; see `Policy`.
        timeout_sec: for "block_then_drop": seconds that a message waits for room before it is dropped.
        sample_every: for "sample": in a queue that is more than half full, one message in this many is kept.

    Example:
        with hcb.outfeed_receiver(back_pressure=hcb.BackPressure(policy="sample", sample_every=100)):
            train()
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

    @property
    def admission(self) -> Admission:
        """What a queue with this policy does with an emission."""
        rule = _RULES[Policy(self.policy)]
        waits = {Wait.FOREVER: None, Wait.FOR_TIMEOUT: self.timeout_sec, Wait.NEVER: 0.0}
        return Admission(waits[rule.wait], rule.steps, self.sample_every)
