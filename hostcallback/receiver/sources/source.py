"""The interface between a transport, which emits frames, and the thread that drains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.columns import BatchColumns

Frame = tuple[Any, int, Any]
"""(memory, offset of the frame's header in it, external payload or None)."""


class SourceCounters(NamedTuple):
    """Counters of a source since it was created.

    Attributes:
        emitted: accepted frames, delivered or not (without dropped ones).
        dropped: frames that the back-pressure policy refused, or overwrote; each used a sequence number.
        emitted_bytes: bytes of the accepted frames, payloads outside the ring included.
        queued_messages: accepted frames that the reader has not released.
        queued_bytes: bytes of the queued frames.
        waiting_producers: emissions that wait for room.
        next_seq: sequence number of the device's next message.
        discarded: accepted frames that are not delivered: overwritten ones and, on a GPU, those of checks that hold
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
    discarded: int
    unpinned: int = 0


class Batch(Protocol):
    """Consecutive frames of one source, in order. Their memory belongs to the source until they are released."""

    @property
    def count(self) -> int:
        """Number of frames."""

    @property
    def frames(self) -> Sequence[Frame]:
        """The frames, oldest first. The end of a stream is always alone in its batch."""

    @property
    def columns(self) -> BatchColumns | None:
        """The same frames as columns; None if the source has none."""

    @property
    def folded(self) -> Sequence[int]:
        """Per frame, the number of failures of the same check that were left out before it; empty if there are none."""

    def release(self) -> None:
        """Returns the frames' memory to the producers."""


class CopiedBatch:
    """Frames that the source does not own, or not alone. See `Batch`."""

    columns = None

    def __init__(self, frames: Sequence[Frame], folded: Sequence[int] = ()) -> None:
        """Holds the frames and, for each, the number of check failures folded before it; empty if none were."""
        self.frames = frames
        self.folded = folded
        self.count = len(frames)

    def release(self) -> None:
        """Does nothing: the frames have memory of their own, or the whole batch is released."""


class Source(Protocol):
    """One device's stream of frames: any number of producers, one reader thread."""

    device: int

    def read(self, timeout_sec: float | None, turn_from: int = 0) -> Batch | None:
        """Waits for the next frames, without holding the interpreter lock. Reader thread only.

        Args:
            timeout_sec: how long to wait at most; None waits without limit.
            turn_from: number of frames from which it waits for the turn to deliver too, which may take longer than
                `timeout_sec` (see `GilThrottle`); 0 never does, and nor does a source without the native library.

        Returns:
            At least one frame; None if `timeout_sec` has passed or `wake` was called.
        """

    def wake(self) -> None:
        """Makes a blocked `read` return None. Any thread."""

    def send_end(self, token: int) -> None:
        """Appends an END_OF_STREAM frame whose consumer id is `token`. Any thread."""

    def post(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int = 0) -> None:
        """Appends a frame of the host, without waiting and regardless of the policy. Any thread.

        Args:
            prefix: header and metadata of the message.
            arrays: its arrays, of elements of whole bytes; they are copied.
            run_id: of the launch to which it belongs; 0 for none.
        """

    def configure(self, back_pressure: BackPressure) -> None:
        """Changes the policy for emissions that find no room, from now on. Any thread."""

    def list_failures(self, count: int) -> None:
        """Sets how many failures of one check in a row a batch has at least; 0 for the default. Reader thread only.

        Of more it has the last one, and counts those between.
        """

    def leave_out(self, on: bool) -> None:
        """Starts or stops dropping every message of programs where it is emitted, whatever the policy. Any thread."""

    def close_calls(self, message: str) -> None:
        """Fails every waiting call and every later one. Any thread."""

    def counters(self) -> SourceCounters:
        """Reads the counters. Any thread."""

    def copy_ahead(self) -> Batch | None:
        """Copies frames that the reader has not read, and that this method has not returned before, oldest first.

        Any one thread, only while the reader thread delivers what it has read. The frames are not taken. An
        END_OF_STREAM frame and the frames behind it are not copied before the reader has read it.

        Returns:
            At most 1024 frames or about 1 MiB; None if there are none.
        """

    def discarded(self) -> int:
        """Number of accepted frames up to the last read that are not delivered. Reader thread only."""
