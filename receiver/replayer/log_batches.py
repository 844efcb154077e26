"""The messages of a log as a dispatcher takes them: batches, calls that nobody waits for, the original timing."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from receiver.errors import CallFailedError
from receiver.runtime.dispatch.calls import Call, Calls
from receiver.sources.source import Frame
from receiver.taplog.format.block import FrameBlock


class LogBatch:
    """Frames of a log, as a source's. See `Batch`."""

    def __init__(self, block: FrameBlock, start: int, stop: int, folded: dict[int, int]) -> None:
        """Those of a block from `start` up to `stop`; takes what was folded before them out of `folded`."""
        self.count = stop - start
        self.columns = None
        data = block.data
        self.frames: Sequence[Frame] = [(data, offset, None) for offset in block.starts[start:stop]]
        self.folded: Sequence[int] = ()
        if folded:
            counts = [folded.pop(seq, 0) for seq in block.seqs[start:stop].tolist()]
            self.folded = counts if any(counts) else ()

    def release(self) -> None:
        """Nothing: the memory is the batch's own."""


class ReplayedCalls(Calls):
    """The calls of a program that nobody runs: their host functions may be bound, and their results go nowhere."""

    def _start(self, call: Call) -> None:
        self._note(call, threading.current_thread())
        with contextlib.suppress(CallFailedError):  # it is deferred
            self._run(call)


class Pace:
    """The original timing, or that faster or slower."""

    def __init__(self, speed: float) -> None:
        """`speed` is how fast, beside the original."""
        self._speed = speed
        self._first_ns: int | None = None
        self._started = 0.0

    def parts(self, times: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What is due of messages with these times, from `start` up to `stop`; waits for it."""
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
