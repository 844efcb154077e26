"""A process's spool: a bounded tap log that takes every message before it is sent, and is read while it is written."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hostcallback.receiver.errors import SpoolError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.options import Forward, WhenFull
from hostcallback.receiver.remote.spool.spool_folders import StreamFolder, making
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import Folded, LogOptions, Losses, Segments
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.frame import Flags

FLUSH_BYTES = 256 << 10
FLUSH_SEC = 0.02
SEGMENT_BYTES = 16 << 20
PARTS = 8
"""Minimum number of segments of a full spool: whole segments are deleted, so that fewer would free too much at once."""

OVERHEAD_BYTES = 4 << 10
"""Bytes that a write may add to its messages: a segment's beginning, descriptors, and chunk headers."""

_CHECK = np.uint64(int(Flags.CHECK))


@dataclass(slots=True)
class _Kept:
    # A segment of the spool, and its content by device: first and last number, messages, bytes.
    number: int
    nbytes: int = 0
    is_finished: bool = False
    devices: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)  # the notes of lost messages that it contains


SEND_BYTES = 256 << 10
SEND_SEC = 0.1
"""Seconds between slices of less than `SEND_BYTES`: each slice wakes several threads on both sides."""

BUSY_SEC = 1.0
"""The same while the last slice is not acknowledged: a busy collector gets fewer and larger slices."""


class SendPolicy:
    """Decides when the data of one stream is sent. Its owner's lock protects it."""

    def __init__(self, send_bytes: int = SEND_BYTES) -> None:
        """No data was sent yet. `send_bytes` is the amount that is sent at once; at most `SEND_BYTES`."""
        self._send_bytes = min(send_bytes, SEND_BYTES)
        self._sent_at = -BUSY_SEC
        self._hurries = False
        self._written = 0
        self._is_idle = True

    def hurry(self) -> None:
        """Sends all data written so far without waiting for more."""
        self._hurries = True

    def wrote(self, nbytes: int) -> bool:
        """Notes that bytes were written; returns whether the sender should look at them now."""
        self._written += nbytes
        return self._is_idle or self._hurries or self._written >= self._send_bytes

    def wait_sec(self, nbytes: int, *, acked: bool) -> float:
        """Returns the seconds for which `nbytes` wait before they are sent, unless more are written.

        Args:
            nbytes: unsent bytes.
            acked: whether all sent data is acknowledged.
        """
        self._is_idle = False
        if self._hurries or nbytes >= self._send_bytes:
            return 0.0
        return max(0.0, self._sent_at + (SEND_SEC if acked else BUSY_SEC) - time.monotonic())

    def sends(self, *, everything: bool) -> None:
        """Notes that a slice is sent now. `everything`: it contains all unsent data."""
        self._sent_at = time.monotonic()
        self._written = 0
        self._hurries = self._hurries and not everything

    def has_nothing(self) -> None:
        """Notes that all written data is sent, so that the sender looks at the next write."""
        self._is_idle = True


class Spool(Segments):
    """The spool of one stream. Any thread writes to its log, whose segments the spool is; the sender's thread reads.

    Attributes:
        key: identifies the stream.
        folder: of its segments.
        log: writes messages into them.
        on_closed: called after the log has been closed.
    """

    def __init__(
        self,
        options: Forward,
        *,
        process_index: int | None = None,
        local_devices: Mapping[str, int] | None = None,
        job: str = "",
    ) -> None:
        """Creates the folder and the first segment.

        Args:
            options: limits and policy.
            process_index: of this process in a program of several.
            local_devices: index of each device among this process's own, by name.
            job: identifies one run of the program, equal in all its processes.

        Raises:
            SpoolError: the folder belongs to another user, or cannot be written to.
        """
        self.key = forwarding_protocol.StreamKey(options.run_name, process_index or 0, uuid.uuid4().hex[:16])
        self.folder = StreamFolder.make(options.folder, self.key)
        self.on_closed: Callable[[], None] = lambda: None
        self._forward = options
        self._info = {
            "process": self.key.epoch,
            "process_index": process_index,
            "job": job,
            "run": self.key.run,
            "stream_process": self.key.process,
            "local_devices": dict(local_devices or {}),
        }
        self._acked = self.sent_before = forwarding_protocol.StreamOffset(0, 0)
        self._reading = 0
        self._is_closing = False
        self._sampled = 0
        segment_bytes = max(1 << 14, min(SEGMENT_BYTES, options.spool_bytes // PARTS))
        flush_bytes = min(FLUSH_BYTES, segment_bytes)
        self._policy = SendPolicy(segment_bytes)
        log_options = LogOptions(
            segment_bytes=segment_bytes, fsync=options.fsync, flush_bytes=flush_bytes, flush_sec=FLUSH_SEC
        )
        try:
            with making(options.folder):
                self.log = LogWriter(self.folder.path, log_options, self)
        except SpoolError:
            self.folder.remove()
            raise

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the collector has not acknowledged."""
        with self._changed:
            return self._waiting()

    def _waiting(self) -> int:
        total = sum(kept.nbytes for kept in self._kept.values() if kept.number >= self._acked.segment)
        return total - (self._acked.offset if self._acked.segment in self._kept else 0)

    # Reading.

    def read(
        self, position: forwarding_protocol.StreamOffset, timeout_sec: float
    ) -> forwarding_protocol.SegmentSlice | None:
        """See `SliceSource`."""
        # The policy holds back only the end of the stream: earlier segments do not grow, so waiting would gain nothing.
        deadline = time.monotonic() + timeout_sec
        with self._changed:
            while True:
                found = self._next(position)
                left_sec = deadline - time.monotonic()
                if found is None:
                    self._policy.has_nothing()
                else:
                    is_last = found[0].segment == max(self._kept) and not self._is_closing
                    wait_sec = (
                        self._policy.wait_sec(found[1], acked=self._acked >= position) if is_last else 0.0
                    )
                    if wait_sec <= 0:
                        break
                    left_sec = min(left_sec, wait_sec)
                if time.monotonic() >= deadline:
                    return None
                self._changed.wait(left_sec)
            position, nbytes = found
            self._reading = position.segment
            self._policy.sends(everything=is_last and nbytes <= forwarding_protocol.PIECE_BYTES)
        # Read without the lock, which devices need after each write: written bytes of a segment do not change.
        return self.folder.read(position, nbytes)

    def _next(
        self, position: forwarding_protocol.StreamOffset
    ) -> tuple[forwarding_protocol.StreamOffset, int] | None:
        kept = self._kept.get(position.segment)
        if kept is not None and kept.nbytes > position.offset:
            return position, kept.nbytes - position.offset
        if kept is not None and not kept.is_finished:
            return None
        for number in sorted(self._kept):
            if number > position.segment and self._kept[number].nbytes:
                return forwarding_protocol.StreamOffset(number, 0), self._kept[number].nbytes
        return None

    def acked(self, position: forwarding_protocol.StreamOffset) -> None:
        """See `SliceSource`. Deletes the segments that the collector has stored."""
        with self._changed:
            self._acked = max(self._acked, position)
            for number, kept in list(self._kept.items()):
                # The last segment stays until it is finished, because the writer still appends to it.
                done = number < position.segment or (
                    number == position.segment and kept.nbytes <= position.offset
                )
                if done and kept.is_finished:
                    self._forget(number)
            self._changed.notify_all()

    def is_sent(self) -> bool:
        """See `SliceSource`."""
        with self._changed:
            return not self._waiting()

    def _forget(self, number: int) -> None:
        del self._kept[number]
        self.folder.segment(number).unlink(missing_ok=True)

    # Writing.

    def begin(self, lock: threading.Lock, losses: Losses) -> None:
        """See `Segments`."""
        self._log_lock = lock  # protects `_losses` and `_sampled`
        self._losses = losses
        # Protects everything else, and is taken last. Not the log's lock: that is held during writes to the file, and
        # by a device that emits without a pause almost always, so that the sender would hardly get it.
        self._changed = threading.Condition()
        self._kept: dict[int, _Kept] = {}

    def new(self, number: int) -> SegmentWriter:
        """See `Segments`."""
        segment = SegmentWriter(self.folder.segment(number), number=number, info=self._info)
        with self._changed:
            self._kept[number] = _Kept(number, segment.nbytes)
        return segment

    def finished(self, segment: SegmentWriter) -> None:
        """See `Segments`."""
        with self._changed:
            kept = self._kept.get(segment.number)
            if kept is not None:
                kept.nbytes, kept.is_finished = segment.nbytes, True
                self._changed.notify_all()

    def wrote(self, segment: SegmentWriter, device: str, block: FrameBlock, folded: Folded) -> None:
        """See `Segments`."""
        first, last = int(block.seqs[0]), int(block.seqs[-1])
        count = len(block) + sum(number for _, number in folded)
        with self._changed:
            devices = self._kept[segment.number].devices
            before = devices.get(device, (first, last, 0, 0))
            devices[device] = before[0], last, before[2] + count, before[3] + block.data.size
            self.noted(segment)

    def noted(self, segment: SegmentWriter, lost: Sequence[Lost] = ()) -> None:
        """See `Segments`."""
        with self._changed:
            kept = self._kept[segment.number]
            kept.lost += lost
            nbytes = segment.nbytes - kept.nbytes
            kept.nbytes = segment.nbytes
            if nbytes and self._policy.wrote(nbytes):
                self._changed.notify_all()

    def hurry(self) -> None:
        """See `Segments`. Has the sender send everything written so far."""
        with self._changed:
            self._policy.hurry()
            self._changed.notify_all()

    def closing(self) -> None:
        """See `Segments`. The last messages wait for no room."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def closed(self) -> None:
        """See `Segments`."""
        self.on_closed()

    def _has_room(self, nbytes: int) -> bool:
        # An empty spool takes any write: a batch larger than the spool would otherwise never fit.
        waiting = self._waiting()
        return not waiting or waiting + nbytes + OVERHEAD_BYTES <= self._forward.spool_bytes

    def wait_for_room(self, nbytes: int) -> None:
        """See `Segments`. Waits or drops segments, as the policy for a full spool says."""
        policy = self._forward.when_full
        with self._changed:
            if policy is WhenFull.DROP_OLDEST:
                while not self._has_room(nbytes) and self._drop_oldest():
                    pass
            if policy is not WhenFull.BLOCK or self._may_write(nbytes):
                return
        logger.warning(
            "%s is full: %d bytes wait for the collector at %s; devices wait until the spool has room",
            self.folder.path, self.waiting_bytes, self._forward.shown_address,
        )  # fmt: skip
        # Another thread may take the room before this one has the log's lock again.
        while not self._may_write(nbytes):
            self._log_lock.release()  # so that the log can be closed meanwhile
            try:
                with self._changed:
                    self.hurry()  # once: it wakes the other devices that wait, and they would wake this one
                    while not self._may_write(nbytes):
                        self._changed.wait()
            finally:
                self._log_lock.acquire()

    def _may_write(self, nbytes: int) -> bool:
        with self._changed:
            return self._is_closing or self._has_room(nbytes)

    def _drop_oldest(self) -> bool:
        for number in sorted(self._kept):
            kept = self._kept[number]
            # Not a segment that is being sent: the collector would get half of it, which no later slice completes.
            if number <= max(self._reading, self._acked.segment) or not kept.is_finished:
                continue
            self._forget(number)
            for note in kept.lost:  # the collector must still receive the dropped segment's notes
                self._losses.note(note)
            reason = "the spool was full: the oldest messages were dropped"
            for device, (first, last, count, nbytes) in kept.devices.items():
                self._lose(device, first, last, count, nbytes, reason)
            return True
        return False

    def _lose(self, device: str, first: int, last: int, count: int, nbytes: int, reason: str) -> None:
        self._losses.count(Lost(device, first, last, count, nbytes, time.time_ns(), reason))
        self._losses.counters.failure = reason

    def choose(self, device: str, block: FrameBlock, folded: Folded) -> Array | None:
        """See `Segments`. Leaves messages out, as the policy for a full spool says."""
        policy = self._forward.when_full
        if policy is WhenFull.BLOCK or self._is_closing:
            return None
        with self._changed:
            has_room = self._has_room(block.data.size)
            half = self._waiting() + block.data.size > self._forward.spool_bytes // 2
        if has_room:
            if policy is not WhenFull.SAMPLE or not half:
                return None
            mask: Array = (np.arange(len(block)) + self._sampled) % self._forward.sample_every == 0
            self._sampled += len(block)
            mask |= (block.flags & _CHECK) != 0  # failed checks are few, and the reason why people record
            reason = f"the spool was half full: one message in {self._forward.sample_every} was kept"
        else:
            mask = np.zeros(len(block), np.bool_)
            reason = "the spool was full: the newest messages were dropped"
        left_out = block.seqs[~mask]
        if left_out.size:
            nbytes = block.data.size * left_out.size // len(block)
            dropped = set(left_out.tolist())
            count = left_out.size + sum(number for seq, number in folded if seq in dropped)
            self._lose(device, int(left_out[0]), int(left_out[-1]), count, nbytes, reason)
        return mask
