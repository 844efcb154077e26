"""Hands the frames of one device to the batch sinks of its scope, also while a tap function keeps the receiver thread.

Recording, forwarding and delivering are readers of one stream. The receiver thread hands each batch to the batch sinks
before it delivers the messages. If that delivery takes long, a thread of this module copies the frames that have come
meanwhile out of the source and hands these on: so a message is recorded soon after it was emitted, however slow the
taps are. The receiver thread then leaves out the frames that were handed on already. Memory stays bounded, because the
copies go to the sinks at once and the frames stay in the source until they are delivered.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Find
from hostcallback.receiver.runtime.dispatch.sink_chain import BatchSink
from hostcallback.receiver.sources.source import Batch, Frame, Source
from hostcallback.receiver.wire import Flags, WireError, decode_header

LOOK_SEC = 0.01
"""Seconds between the thread's checks of the running delivery, and the duration from which a delivery is long."""

REST_SEC = 1.0
"""Seconds without a delivery after which the thread sleeps until the next one begins."""

_NONE = -1


class PartOfBatch:
    """The last frames of a batch. See `Batch`."""

    columns = None

    def __init__(self, frames: Sequence[Frame], folded: Sequence[int]) -> None:
        """Holds the frames and, for each, the number of check failures folded before it; empty if none were."""
        self.frames = frames
        self.folded = folded
        self.count = len(frames)

    def release(self) -> None:
        """Does nothing: the whole batch is released."""


class BatchFeed:
    """Hands each frame of one device to the batch sinks once, in order. The receiver thread calls it.

    Attributes:
        sinks: the batch sinks of the current scope.
    """

    def __init__(self, device_name: str, source: Source | None, find: Find) -> None:
        """Makes the feed of one device.

        Args:
            device_name: the device's name, for the sinks.
            source: the source that frames are copied from while a delivery takes long; None copies none.
            find: finds the consumer of an id, for the sinks.
        """
        self.sinks: tuple[BatchSink, ...] = ()
        self._device_name = device_name
        self._source = source
        self._find = find
        # Protects everything below. The sinks are called with it, so that batches stay in order.
        self._lock = threading.Lock()
        self._next_seq = 0
        self._ahead: list[int] = []  # sequence numbers handed on that the reader has not read yet
        self._delivering_since: float | None = None
        self._wanted = threading.Event()
        self._at_end = False  # whether the reader delivers an END_OF_STREAM frame
        self._thread: threading.Thread | None = None
        self._stopping = False

    def take(self, batch: Batch, last_seq: int) -> None:
        """Hands on a batch that the reader has read, without the frames that were handed on before. Does not raise.

        Args:
            batch: the frames.
            last_seq: the sequence number of the last one; negative if it is unknown.
        """
        # Without the lock: without sinks no thread copies ahead, and the receiver thread alone changes
        # `sinks`.
        if not self.sinks and not self._ahead:
            self._next_seq = _NONE if last_seq < 0 else last_seq + 1
            return
        with self._lock:
            rest = self._rest(batch) if self._ahead else batch
            if rest is not None:
                self._hand_on(rest, last_seq)
            self._at_end = batch.count == 1 and _is_end(batch.frames[0])

    def lose(self, count: int, reason: str) -> None:
        """Tells the sinks that messages were lost before they could be read."""
        with self._lock:
            self._next_seq = _NONE  # the gap that they leave is not a drop
            for sink in self.sinks:
                sink.lose(self._device_name, count, reason)

    @contextmanager
    def while_delivering(self) -> Iterator[None]:
        """Lets the thread copy frames out of the source if the block takes long."""
        # The delivery of an END_OF_STREAM frame changes the scope: the frames behind it belong to other sinks.
        if not self.sinks or self._source is None or self._at_end:
            yield
            return
        if self._thread is None:
            self._start()
        # Without the lock: the copying thread only reads it, and looks at it again under the lock before it
        # copies.
        self._delivering_since = perf_counter()
        self._wanted.set()
        try:
            yield
        finally:
            # Takes the lock, because the reader must not read on while frames are copied: their order would be lost.
            with self._lock:
                self._delivering_since = None

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        self._stopping = True
        self._wanted.set()

    def _hand_on(self, batch: Batch, last: int) -> None:
        expected, dropped = self._next_seq, 0
        if last < 0:
            self._next_seq = _NONE
        else:
            if expected != _NONE:
                dropped = max(0, last + 1 - expected - batch.count - sum(batch.folded))
            self._next_seq = last + 1
        for sink in self.sinks:
            sink.record_batch(
                self._device_name,
                batch,
                self._find,
                dropped=dropped,
                first_seq=max(0, expected),
                last_seq=max(0, last),
            )

    def _rest(self, batch: Batch) -> Batch | None:
        # The frames of the batch that were not handed on ahead; None if all were.
        seqs = [_seq_of(frame) for frame in batch.frames]
        first = next((place for place, seq in enumerate(seqs) if seq == _NONE or seq >= self._next_seq), None)
        last = seqs[-1] if first is None else max(seqs[first], self._next_seq - 1)
        done, self._ahead = self._ahead, self._ahead[bisect_right(self._ahead, last) :]
        if first is None:
            return None
        folded = list(batch.folded[first:])
        if folded and folded[0]:
            # Failures of a check stand in the source one by one; some of those before this frame were handed on.
            before = seqs[first - 1] if first else _NONE
            folded[0] -= min(folded[0], bisect_left(done, seqs[first]) - bisect_right(done, before))
        if not first and not (folded and folded[0] != batch.folded[0]):
            return batch
        return PartOfBatch(batch.frames[first:], folded if any(folded) else ())

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name=f"hostcallback-ahead-{self._device_name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        last = perf_counter()
        while not self._stopping:
            # An idle device must cost no wake-ups, but one that delivers must not pay for a wake-up per batch
            # either.
            if perf_counter() - last > REST_SEC:
                self._wanted.wait()
            self._wanted.clear()
            time.sleep(LOOK_SEC)
            since, now = self._delivering_since, perf_counter()
            if since is not None:
                last = now
                if now - since >= LOOK_SEC:
                    try:
                        while self._copy():
                            pass
                    except Exception:  # the receiver thread still hands on every batch
                        logger.exception(
                            "messages of %s are recorded only as they are delivered", self._device_name
                        )
                        self._source = None
                        return
            elif self._wanted.is_set():
                last = now

    def _copy(self) -> bool:
        with self._lock:
            # The delivery may have ended since `_run` looked: then the reader may read, and copying would mix
            # up the order.
            if self._delivering_since is None or self._source is None or not self.sinks:
                return False
            batch = self._source.copy_ahead()
            if batch is None:
                return False
            seqs = [_seq_of(frame) for frame in batch.frames]
            self._ahead += seqs
            self._hand_on(batch, seqs[-1])
            return True


def _is_end(frame: Frame) -> bool:
    memory, offset, _ = frame
    try:
        return bool(decode_header(memory, offset).flags & Flags.END_OF_STREAM)
    except WireError:  # the decoder reports it when the frame is delivered
        return False


def _seq_of(frame: Frame) -> int:
    memory, offset, _ = frame
    try:
        return decode_header(memory, offset).seq
    except WireError:
        return _NONE
