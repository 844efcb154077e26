"""Writes a log: collects messages by device, appends them to segments, starts new segments, deletes old ones."""

from __future__ import annotations

import atexit
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
from hostcallback.receiver.taplog.format.compression import Compressor
from hostcallback.receiver.taplog.format.errors import Lost, ThinnedTap, segment_name
from hostcallback.receiver.taplog.format.steps import StepFinder
from hostcallback.receiver.taplog.writing.frame_copier import Room
from hostcallback.receiver.taplog.writing.options import LogCounters, LogOptions
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter, WriteBuffer
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

RETRY_SEC = 1.0
"""Seconds after a failed write in which nothing is written: messages that come meanwhile are lost."""


Messages = tuple[FrameBlock, Sequence[tuple[int, int]], bool]
"""Messages of one device in order; pairs of a sequence number and the count of failures of the same check that were
left out before it; and whether the messages must be written at once."""


class LogWriter:
    """This process's log in one folder, which several processes may share. Any thread.

    Errors while writing are not raised: messages that cannot be written are counted, logged once, and noted in the log
    when writing works again.
    """

    def __init__(self, directory: str | os.PathLike[str], options: LogOptions | None = None) -> None:
        """Creates the folder, if it does not exist, and the first segment.

        Raises:
            OSError: they cannot be created.
            TapLogError: compression is requested, and its package is missing.
        """
        self.directory = Path(directory)
        self.options = options or LogOptions()
        self._counters = LogCounters()
        self._compressor = Compressor() if self.options.compress else None
        self._described: dict[int, TapDescriptor] = {}
        self._steps = StepFinder(self._described)
        # At least four segments, so that deleting the oldest loses at most a quarter of the messages.
        keep = self.options.keep_bytes
        self._segment_bytes = min(
            self.options.segment_bytes, keep // 4 if keep else self.options.segment_bytes
        )
        self._number = 0
        self._own: list[tuple[Path, int]] = []  # complete segments and their lengths
        self._start_anew()
        self.options.permissions.make_folder(self.directory)
        self._segment: SegmentWriter | None = self._new_segment()
        _open_writers.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()  # protects everything below, and the segment
        self._due = threading.Condition(self._lock)
        self._pending: dict[str, WriteBuffer] = {}
        self._lost: dict[tuple[str, str], Lost] = {}
        self._flush_at: float | None = None
        self._retry_at = 0.0
        self._begun = 0.0
        self._timer: _Timer | None = None

    @property
    def counters(self) -> LogCounters:
        """A copy of the current counters."""
        with self._lock:
            unfinished = 0 if self._segment is None else self._segment.nbytes
            counters = self._counters
            return replace(
                counters,
                nbytes=counters.nbytes + unfinished,
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
                pending = self._pending[device] = WriteBuffer()
            messages = collect(pending.room)
            if messages is None:
                return
            block, folded, at_once = messages
            pending.add(block, list(folded))
            if at_once or pending.nbytes >= self.options.flush_bytes:
                self._write(device, pending)
                self._rotate_if_due()
                if at_once:
                    self._hasten()
            elif self._flush_at is None:
                self._flush_at = time.monotonic() + self.options.flush_sec
                self._wake_timer()

    def lose(
        self, device: str, first_seq: int, last_seq: int, count: int, reason: str, nbytes: int = 0
    ) -> None:
        """Notes that messages of a device are missing."""
        with self._lock:
            self._note_lost(Lost(device, first_seq, last_seq, count, nbytes, time.time_ns(), reason))
            if self._flush_at is None:
                self._flush_at = time.monotonic() + self.options.flush_sec
                self._wake_timer()

    def note_rules(self, thinned: Sequence[ThinnedTap]) -> None:
        """Notes which taps rules thin out, and the messages suppressed since the last note. Does not raise OSError."""
        self._note(lambda segment: segment.rules(thinned, time.time_ns()))

    def note_exceptions(self, told: list[dict[str, Any]]) -> None:
        """Notes the exceptions of tap functions so far, see `FailureHistory.as_dicts`. Does not raise OSError."""
        self._note(lambda segment: segment.exceptions(told, time.time_ns()))

    def _note(self, write: Callable[[SegmentWriter], None]) -> None:
        with self._lock:
            try:
                write(self._open_segment())
            except OSError as error:
                self._failed(error)

    def write(self) -> None:
        """Writes all collected messages to the file, without hurrying other uses of it, such as forwarding."""
        with self._lock:
            self._flush()

    def flush(self) -> None:
        """Writes all collected messages, and has them forwarded at once if the log is a spool."""
        with self._lock:
            # Tries also within RETRY_SEC after a failure, because the caller wants the messages in the file now.
            self._retry_at = min(self._retry_at, time.monotonic())
            self._flush()
            self._hasten()

    def close(self) -> None:
        """Writes all collected messages and completes the segment. Later messages start a new one."""
        with self._lock:
            self._retry_at = min(self._retry_at, time.monotonic())
            self._flush()
            self._finish_segment()
            _open_writers.discard(self)
            timer, self._timer = self._timer, None
            self._due.notify_all()
        if timer is not None:  # joined without the lock, which the timer needs to end
            timer.join()

    def after_fork_in_child(self) -> None:
        """Drops the parent's segment and unwritten messages in a forked child."""
        if self._segment is not None:
            self._segment.abandon()
        self._segment = None
        self._own = []
        self._number = 0
        self._counters = LogCounters()
        self._start_anew()

    def _write(self, device: str, pending: WriteBuffer) -> None:
        if not pending.nbytes:
            return
        self._wait_for_room(pending)
        taken, before = pending.take(), pending.step
        if taken is None:
            return
        block, folded = taken
        steps = self._steps.in_force(block, before)
        pending.step = int(steps[-1])
        mask = self._choose(device, block, folded)
        if mask is not None:
            if not mask.any():
                return
            block, steps = block.taken_out(mask), steps[mask]
        try:
            segment = self._open_segment()
            segment.frames(device, block, self._described, step_before=before, steps=steps, folded=folded)
            if self.options.fsync:
                segment.sync()
        except BaseException as error:
            self._failed(error)
            lost = len(block) + sum(count for _, count in folded)
            self._note_lost(
                Lost(
                    device,
                    int(block.seqs[0]),
                    int(block.seqs[-1]),
                    lost,
                    block.data.size,
                    time.time_ns(),
                    f"the log could not be written: {_reason(error)}",
                )
            )
            self._counters.lost_messages += lost
            self._counters.lost_bytes += block.data.size
            self._counters.lost_by_device[device] += lost
            if not isinstance(
                error, OSError | MemoryError
            ):  # such as an interrupt, which the caller must see
                raise
            return
        self._counters.messages += len(block)
        self._wrote(segment, device, block, folded)

    def _wait_for_room(self, pending: WriteBuffer) -> None:
        """Called before pending messages are written; may wait, and release the lock meanwhile."""

    def _choose(self, device: str, block: FrameBlock, folded: Sequence[tuple[int, int]]) -> Array | None:
        """Returns a mask of the messages to write, or None for all. The others must have been noted as lost."""
        return None

    def _wrote(
        self, segment: SegmentWriter, device: str, block: FrameBlock, folded: Sequence[tuple[int, int]]
    ) -> None:
        """Called after messages have been written."""

    def _hasten(self) -> None:
        """Called after messages have been written that must not wait."""

    def _rotate_if_due(self) -> None:
        segment = self._segment
        if segment is None or (
            segment.nbytes < self._segment_bytes
            and time.monotonic() - self._begun < self.options.segment_sec
            and not segment.has_many_taps
        ):
            return
        # Messages of other devices that came before belong into this segment.
        for device, pending in self._pending.items():
            self._write(device, pending)
        self._finish_segment()
        if self.options.keep_bytes is not None:
            self._delete_old(self.options.keep_bytes - self._segment_bytes)

    def _flush(self) -> None:
        self._flush_at = None
        for device, pending in self._pending.items():
            self._write(device, pending)
        if self._lost:
            try:
                self._open_segment()
            except OSError as error:
                self._failed(error)
        self._rotate_if_due()

    def _open_segment(self) -> SegmentWriter:
        """Returns the segment to append to, after writing the notes of lost messages into it.

        Raises:
            OSError: there is none, and none can be created.
        """
        if time.monotonic() < self._retry_at:
            raise _NotTried(self._counters.failure)
        segment = self._segment or self._new_segment()
        self._segment = segment
        # Each note is removed only after it was written: `lost` raises if the disk is still full.
        while self._lost:
            key = next(iter(self._lost))
            segment.lost(self._lost[key])
            del self._lost[key]
        if self._retry_at:
            self._retry_at = 0.0
            logger.warning("%s: recording works again", self.directory)
        return segment

    def _new_segment(self) -> SegmentWriter:
        self._number += 1
        path = self.directory / segment_name(time.time_ns(), self._number)
        segment = SegmentWriter(
            path, number=self._number, process_index=self.options.process_index, job=self.options.job,
            run=self.options.run, info={"config": self.options.config} if self.options.config else None,
            compressor=self._compressor, permissions=self.options.permissions,
        )  # fmt: skip
        self._begun = time.monotonic()
        return segment

    def _failed(self, error: BaseException) -> None:
        # A failed write may have left part of a chunk, and a chunk after it could not be found without a search.
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abandon()
            self._count(segment)
        first = not self._retry_at
        # Otherwise a busy program would push the next try further away with each message.
        if not isinstance(error, _NotTried):
            self._counters.failure = _reason(error)
            self._retry_at = time.monotonic() + RETRY_SEC
        if first:
            logger.error(
                "%s: messages cannot be recorded (%s); the program continues, and lost messages are counted",
                self.directory, self._counters.failure,
            )  # fmt: skip

    def _note_lost(self, lost: Lost) -> None:
        # One note per device and reason until it can be written, however long the disk is full.
        key = lost.device, lost.reason
        known = self._lost.get(key)
        if known is not None:
            lost = lost._replace(
                first_seq=min(known.first_seq, lost.first_seq),
                last_seq=max(known.last_seq, lost.last_seq),
                messages=known.messages + lost.messages,
                nbytes=known.nbytes + lost.nbytes,
            )
        self._lost[key] = lost

    def _finish_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        with contextlib.suppress(OSError):  # the segment can be read without its index
            segment.close()
        self._count(segment)

    def _count(self, segment: SegmentWriter) -> None:
        self._counters.nbytes += segment.nbytes
        if not segment.is_empty or self._number == 1:
            self._own.append((segment.path, segment.nbytes))
        else:  # the first segment stays even without messages, so that an empty log is a log
            with contextlib.suppress(OSError):
                segment.path.unlink()

    def _delete_old(self, keep_bytes: int) -> None:
        # The last one stays: a log always has its newest messages, for readers and after a kill.
        while len(self._own) > 1 and sum(nbytes for _, nbytes in self._own) > keep_bytes:
            path, _ = self._own.pop(0)
            # Another process may delete old segments as well, and a segment that stays does no harm.
            with contextlib.suppress(OSError):
                path.unlink()

    def _wake_timer(self) -> None:
        if self._timer is None:
            _open_writers.add(self)
            self._timer = _Timer(self)
            self._timer.start()
        else:
            self._due.notify_all()

    def wait_and_flush(self, timer: threading.Thread) -> bool:
        """One round of the timer's thread; False if the thread must end."""
        with self._lock:
            # The log was closed, or opened again with another timer.
            if self._timer is not timer:
                return False
            left = None if self._flush_at is None else self._flush_at - time.monotonic()
            if left is None or left > 0:
                self._due.wait(left)
            else:
                self._flush()
            return True


class _NotTried(OSError):
    # The last attempt failed less than RETRY_SEC ago.
    pass


def _reason(error: BaseException) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error or type(error).__name__)


class _Timer(threading.Thread):
    # Writes messages after `flush_sec` if no later message triggers a write.

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(name="hostcallback-recorder", daemon=True)
        self._writer = writer

    def run(self) -> None:
        while self._writer.wait_and_flush(self):
            pass


_open_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # atexit runs handlers in reverse order: those of modules that import this one deliver queued messages first.
    for writer in list(_open_writers):
        writer.close()


def _after_fork_in_child() -> None:
    for writer in list(_open_writers):
        writer.after_fork_in_child()


processes.in_child(processes.Stage.TAPLOG, _after_fork_in_child)
