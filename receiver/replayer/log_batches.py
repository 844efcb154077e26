"""A log's messages in the form that a dispatcher takes: batches, calls without programs, and the original timing."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from hostcallback.receiver.errors import CallFailedError
from hostcallback.receiver.runtime.dispatch.calls import Call, Calls
from hostcallback.receiver.sources.source import Frame
from hostcallback.receiver.taplog.format.block import FrameBlock


class LogBatch:
    """Frames of a log as a batch. See `Batch`."""

    def __init__(self, block: FrameBlock, start: int, stop: int, folded: dict[int, int]) -> None:
        """Takes the frames of a block in [start, stop), and removes their counts of left out failures from `folded`."""
        self.count = stop - start
        self.columns = None
        data = block.data
        self.frames: Sequence[Frame] = [(data, offset, None) for offset in block.starts[start:stop]]
        self.folded: Sequence[int] = ()
        if folded:
            counts = [folded.pop(seq, 0) for seq in block.seqs[start:stop].tolist()]
            self.folded = counts if any(counts) else ()

    def release(self) -> None:
        """Does nothing: the frames own their memory."""


class ReplayedCalls(Calls):
    """Calls whose program does not run: host functions may be bound, and their results are dropped."""

    def _start(self, call: Call) -> None:
        self._note(call, threading.current_thread())
        with contextlib.suppress(CallFailedError):  # the failure is in the scope's deferred errors
            self._run(call)


class Pace:
    """Keeps the original timing, or a multiple of its speed."""

    def __init__(self, speed: float) -> None:
        """`speed` is relative to the original: 2.0 takes half the time."""
        self._speed = speed
        self._first_ns: int | None = None
        self._started = 0.0

    def parts(self, times: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Waits for the messages with these times, from index `start` to `stop`; yields the ranges that are due."""
        if self._first_ns is None:
            self._first_ns, self._started = times[start], time.perf_counter()
        while start < stop:
            due = self._started + (times[start] - self._first_ns) / 1e9 / self._speed
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            reached = self._first_ns + (time.perf_counter() - self._started) * 1e9 * self._speed
            end = bisect.bisect_right(times, reached, start + 1, stop)
            yield start, end
            start = end
