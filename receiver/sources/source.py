"""What a source of frames is: the interface between a transport and the thread that drains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from receiver.sources.back_pressure import BackPressure
from receiver.sources.columns import BatchColumns

Frame = tuple[Any, int, Any]
"""(memory, offset of the frame's header in it, external payload or None)."""


@dataclass(frozen=True, slots=True)
class SourceCounters:
    """What a source has taken in since it was made.

    Attributes:
        emitted: frames accepted, delivered or not (dropped ones excluded).
        dropped: frames refused by the back-pressure policy, or overwritten; each spent a sequence number.
        emitted_bytes: bytes of the accepted frames, external payloads included.
        queued_messages: accepted frames that the reader has not released yet.
        queued_bytes: bytes of those.
        waiting_producers: emissions that wait for room now.
        next_seq: the sequence number the next message of this device gets.
        discarded: accepted frames that are not delivered: overwritten ones, and, on a GPU, those of checks that hold
            and of failed copies.
        unpinned: copies from a GPU into memory that its driver could not pin, which are slower.
    """

    emitted: int
    dropped: int
    emitted_bytes: int
    queued_messages: int
    queued_bytes: int
    waiting_producers: int
    next_seq: int
    discarded: int = 0
    unpinned: int = 0


class Batch(Protocol):
    """Consecutive frames of one source, in order. Their memory is the source's until released."""

    @property
    def count(self) -> int:
        """How many frames there are."""

    @property
    def frames(self) -> Sequence[Frame]:
        """The frames, oldest first. The end of a stream is a batch of its own."""

    @property
    def columns(self) -> BatchColumns | None:
        """The same frames as columns, where the source has them."""

    @property
    def folded(self) -> Sequence[int]:
        """For each frame, how many failures of the same check were left out before it; empty for none at all."""

    def release(self) -> None:
        """Gives the frames' memory back to the producers."""


class Source(Protocol):
    """One device's stream of frames: any number of producers, one reader thread."""

    device: int

    def read(self, timeout_sec: float | None) -> Batch | None:
        """Blocks for the next frames, without holding the interpreter lock. Reader thread only.

        Returns:
            At least one frame; None when `timeout_sec` passed or `wake` was called.
        """

    def wake(self) -> None:
        """Makes a blocked `read` return None. Any thread."""

    def send_end(self, token: int) -> None:
        """Appends an END_OF_STREAM frame whose consumer id is `token`. Any thread."""

    def configure(self, back_pressure: BackPressure) -> None:
        """Changes what happens to emissions that find no room, from now on. Any thread."""

    def close_calls(self, message: str) -> None:
        """Fails every call that waits, and those that are still to come. Any thread."""

    def counters(self) -> SourceCounters:
        """Any thread."""

    def discarded(self) -> int:
        """How many frames up to the last read were accepted and are not delivered. Reader thread only."""
