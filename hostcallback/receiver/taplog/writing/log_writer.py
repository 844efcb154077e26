"""Writes a log: collects messages by device, and appends them to one segment after the other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Lost, ThinnedTap
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.writing import rotation, segment_writer
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

RETRY_SEC = 1.0
"""Seconds after a failed write in which nothing is written: messages that come meanwhile are lost."""

LOOK_SEC = 1.0
"""Seconds between two looks, while messages are written, whether their file was deleted: one may take long on NFS."""

DELETED = "its file was deleted"


Messages = tuple[FrameBlock, rotation.Folded, bool]
"""Messages of one device in order, what was folded into them, and whether they must be written at once."""


Room = Callable[[int], Array]
"""Returns that many bytes of memory, uint8, aligned to 8."""


class LogWriter:
    """This process's log in one folder. Any thread.

    Errors while writing are not raised: messages that cannot be written are counted, logged once, and noted in the log
    when writing works again.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: rotation.LogOptions | None = None,
        segments: rotation.Segments | None = None,
    ) -> None:
        """Creates the first segment; by default those of a tap log in a folder, which is created if it does not exist.

        Raises:
            OSError: they cannot be created.
            TapLogError: compression is requested, and its package is missing.
        """
        self.directory = Path(directory)
        self.options = options or rotation.LogOptions()
        self._segments = segments or rotation.LogSegments(self.directory, self.options)
        self._described: dict[int, TapDescriptor] = {}
        self._steps = StepFinder(self._described)
        self._segment: segment_writer.SegmentWriter | None = None
        self._start_anew()
        self._segment = self._new_segment()
        _open_writers.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()  # protects everything below, and the segments
        self._due = threading.Condition(self._lock)
        self._pending: dict[str, segment_writer.WriteBuffer] = {}
        self._losses = rotation.Losses()
        self._number = 0
        self._flush_at: float | None = None
        self._retry_at = 0.0
        self._look_at = 0.0
        self._is_failing = False  # until messages have been written; a note may fit where messages do not
        self._begun = 0.0
        self._timer: threading.Thread | None = None
        self._segments.begin(self._lock, self._losses)

    @property
    def counters(self) -> rotation.LogCounters:
        """A copy of the current counters."""
        with self._lock:
            unfinished = 0 if self._segment is None else self._segment.nbytes
            counters = self._losses.counters
            return replace(
                counters,
                nbytes=counters.nbytes + unfinished,
                unnoted_messages=self._losses.unnoted,
                lost_by_device=counters.lost_by_device.copy(),
            )

    def describe(self, described: TapDescriptor) -> None:
        """Registers the descriptor of a consumer, before its first messages."""
        self._described[described.consumer_id] = described

    def knows(self, consumer_id: int) -> bool:
        """Whether the consumer's descriptor is registered."""
        return consumer_id in self._described

    def append(self, device: str, block: FrameBlock, *, at_once: bool = False) -> None:
        """Takes ownership of messages of one device, in order; with `at_once` they are written immediately."""
        self.record(device, lambda room: (block, (), at_once))

    def record(self, device: str, collect: Callable[[Room], Messages | None]) -> None:
        """Takes messages of one device, in order: `collect` copies them into the memory that it is given.

        `collect` must not call the log, except for `describe` and `knows`. Its exceptions are raised here, and
        nothing is taken then.
        """
        with self._lock:
            pending = self._pending.get(device)
            if pending is None:
                pending = self._pending[device] = segment_writer.WriteBuffer()
            messages = collect(pending.room)
            if messages is None:
                return
            block, folded, at_once = messages
            pending.add(block, list(folded))
            if at_once or pending.nbytes >= self.options.flush_bytes:
                self._write(device, pending)
                self._rotate_if_due()
                if at_once:
                    self._segments.hurry()
            else:
                self._flush_later()

    def lose(
        self, device: str, first_seq: int, last_seq: int, count: int, reason: str, nbytes: int = 0
    ) -> None:
        """Notes that messages of a device are missing."""
        with self._lock:
            self._losses.note(Lost(device, first_seq, last_seq, count, nbytes, time.time_ns(), reason))
            self._flush_later()

    def note_rules(self, thinned: Sequence[ThinnedTap]) -> None:
        """Notes which taps rules thin out, and the messages suppressed since the last note. Does not raise OSError."""
        self._note(lambda segment: segment.rules(thinned, time.time_ns()))

    def note_exceptions(self, told: list[dict[str, Any]]) -> None:
        """Notes the exceptions of tap functions so far, see `FailureHistory.as_dicts`. Does not raise OSError."""
        self._note(lambda segment: segment.exceptions(told, time.time_ns()))

    def _note(self, write: rotation.Note) -> None:
        with self._lock:
            try:
                segment = self._open_segment()
                write(segment)
                self._losses.wrote_note(write)
                self._segments.noted(segment)
            except OSError as error:
                self._failed(error)

    def write(self) -> None:
        """Writes all collected messages to the file, without hurrying other uses of it, such as forwarding."""
        with self._lock:
            self._flush()

    def flush(self, *, look: bool = False) -> None:
        """Writes all collected messages, and has them forwarded at once if the log is a spool.

        With `look` the counters have what was lost until now with a deleted file.
        """
        with self._lock:
            # Tries also within RETRY_SEC after a failure, because the caller wants the messages in the file now.
            self._retry_at = min(self._retry_at, time.monotonic())
            if look:
                self._look()
            self._flush()
            self._segments.hurry()

    def close(self) -> None:
        """Writes all collected messages and completes the segment. Later messages start a new one."""
        with self._lock:
            self._segments.closing()
            self._retry_at = min(self._retry_at, time.monotonic())
            self._look()  # before the last messages and notes are written, so that they go into a file that is there
            self._flush()
            self._finish_segment()
            _open_writers.discard(self)
            timer, self._timer = self._timer, None
            self._due.notify_all()
        if timer is not None:  # joined without the lock, which the timer needs to end
            timer.join()
        self._segments.closed()

    def after_fork_in_child(self) -> None:
        """Drops the parent's segment and unwritten messages in a forked child."""
        if self._segment is not None:
            self._segment.abandon()
        self._segment = None
        self._start_anew()

    def _write(self, device: str, pending: segment_writer.WriteBuffer) -> None:
        if not pending.nbytes:
            return
        self._segments.wait_for_room(pending.nbytes)
        taken, before = pending.take(), pending.step
        if taken is None:
            return
        block, folded = taken
        steps = self._steps.in_force(block, before)
        pending.step = int(steps[-1])
        mask = self._segments.choose(device, block, folded)
        if mask is not None:
            if not mask.any():
                return
            block, steps = block.taken_out(mask), steps[mask]
        count = len(block) + sum(number for _, number in folded)
        first, last = int(block.seqs[0]), int(block.seqs[-1])
        lost = Lost(device, first, last, count, block.data.size, time.time_ns(), _lost_because(DELETED))
        try:
            segment = self._open_segment()
            segment.frames(device, block, self._described, step_before=before, steps=steps, folded=folded)
            if self.options.fsync:
                segment.sync()
        except BaseException as error:
            self._failed(error)
            self._losses.count(lost._replace(reason=_lost_because(_reason(error))))
            # Such as an interrupt, which the caller must see.
            if not isinstance(error, OSError | MemoryError):
                raise
            return
        self._losses.wrote(lost)
        if self._is_failing:
            self._is_failing = False
            logger.warning("%s: recording works again", self.directory)
        self._segments.wrote(segment, device, block, folded)

    def _rotate_if_due(self) -> None:
        segment = self._segment
        if segment is None or not self.options.ends(segment, time.monotonic() - self._begun):
            return
        self._write_all()  # messages of other devices that came before belong into this segment
        self._finish_segment()

    def _write_all(self) -> None:
        # A copy: waiting for room gives up the lock, and other devices may begin meanwhile.
        for device, pending in list(self._pending.items()):
            self._write(device, pending)

    def _flush(self) -> None:
        self._flush_at = None
        self._write_all()
        if self._losses:
            try:
                self._open_segment()
            except OSError as error:
                self._failed(error)
        self._rotate_if_due()

    def _flush_later(self) -> None:
        if self._flush_at is not None:
            return
        self._flush_at = time.monotonic() + self.options.flush_sec
        if self._timer is None:
            _open_writers.add(self)
            self._timer = threading.Thread(
                target=self._write_when_due, name="hostcallback-recorder", daemon=True
            )
            self._timer.start()
        else:
            self._due.notify_all()

    def _open_segment(self) -> segment_writer.SegmentWriter:
        """Returns the segment to append to, after writing the notes that no segment has into it.

        Raises:
            OSError: there is none, and none can be created.
        """
        if time.monotonic() < self._retry_at:
            raise _NotTried(self._losses.counters.failure)
        if time.monotonic() >= self._look_at:
            self._look()
        segment = self._segment or self._new_segment()
        self._segment = segment
        if self._losses:
            self._segments.noted(segment, self._losses.write_to(segment))
        self._retry_at = 0.0
        return segment

    def _new_segment(self) -> segment_writer.SegmentWriter:
        self._number += 1
        segment = self._segments.new(self._number)
        self._begun = time.monotonic()
        return segment

    def _look(self) -> None:
        # If the segment's file was deleted, the next write begins another one.
        self._look_at = time.monotonic() + LOOK_SEC
        segment = self._segment
        if segment is None:
            return
        if not self._segments.is_deleted(segment):
            self._losses.seen()
            return
        self._segment = None
        segment.abandon()
        self._losses.counters.nbytes += segment.nbytes
        if self._losses.deleted():
            self._fails(DELETED)

    def _failed(self, error: BaseException) -> None:
        self._look()
        # A failed write may have left part of a chunk, and a chunk after it could not be found without a search.
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abandon()
            self._finished(segment)
        # Otherwise a busy program would push the next try further away with each message.
        if not isinstance(error, _NotTried):
            self._retry_at = time.monotonic() + RETRY_SEC
        self._fails(_reason(error))

    def _fails(self, reason: str) -> None:
        first, self._is_failing = not self._is_failing, True
        self._losses.counters.failure = reason
        if first:
            logger.error(
                "%s: messages cannot be recorded (%s); the program continues, and lost messages are counted",
                self.directory, reason,
            )  # fmt: skip

    def _finish_segment(self) -> None:
        self._look()
        segment, self._segment = self._segment, None
        if segment is None:
            return
        with contextlib.suppress(OSError):  # the segment can be read without its index
            segment.close()
        self._finished(segment)

    def _finished(self, segment: segment_writer.SegmentWriter) -> None:
        self._losses.counters.nbytes += segment.nbytes
        self._segments.finished(segment)

    def _write_when_due(self) -> None:
        # The timer's thread: writes messages after `flush_sec` if no later message triggers a write.
        timer = threading.current_thread()
        with self._lock:
            while self._timer is timer:  # else the log was closed, or opened again with another timer
                left = None if self._flush_at is None else self._flush_at - time.monotonic()
                if left is None or left > 0:
                    self._due.wait(left)
                else:
                    self._flush()


class _NotTried(OSError):
    # The last attempt failed less than RETRY_SEC ago.
    pass


def _lost_because(reason: str) -> str:
    return f"the log could not be written: {reason}"


def _reason(error: BaseException) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error or type(error).__name__)


_open_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close()


processes.at_end(_close_all)


def _after_fork_in_child() -> None:
    for writer in list(_open_writers):
        writer.after_fork_in_child()


processes.in_child(processes.Stage.TAPLOG, _after_fork_in_child)
