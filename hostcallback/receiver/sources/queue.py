"""The source of platforms without a native handler: a bounded queue that Python callbacks fill."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.errors import CallFailedError
from hostcallback.receiver.log import logger
from hostcallback.receiver.sources.back_pressure import BackPressure, Step, admit
from hostcallback.receiver.sources.settled import settled
from hostcallback.receiver.sources.source import CopiedBatch, Frame, SourceCounters
from hostcallback.receiver.wire.frame import Flags, decode_header, encode_prefix, frame_from_prefix

CAPACITY_BYTES = 64 << 20
WARN_AFTER_SEC = 2.0
BATCH_FRAMES = 256
BATCH_BYTES = 1 << 20


class _QueueBatch:
    """Frames that the reader or a caller took from the queue. See `Batch`."""

    def __init__(self, source: QueueSource, frames: list[bytes]) -> None:
        self._source = source
        self._frames = frames
        self.count = len(frames)
        self.columns = None
        self.frames: Sequence[Frame] = [(frame, 0, None) for frame in frames]
        self.folded: Sequence[int] = ()

    def release(self) -> None:
        """Returns the frames' room to the queue."""
        self._source.free(len(self._frames), sum(map(len, self._frames)))
        self._frames = []


class QueueSource:
    """A queue of encoded frames with a limit in bytes.

    An emission that waits for room blocks the device's execution thread; with the native transport it does not.
    """

    def __init__(self, device: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        """`device` is the device's id. An empty queue admits one frame larger than `capacity_bytes`."""
        self.device = device
        self._capacity_bytes = capacity_bytes
        # Producers wait here for room, callers for their turn and the reader for frames. Each change may
        # concern any of them, hence `notify_all`.
        self._changed = threading.Condition()  # protects everything below
        self._frames: deque[bytes] = deque()
        self._woken = False
        self._seq = 0
        self._position = 0
        self._emitted_bytes = 0
        self._held_frames = 0
        self._held_bytes = 0
        self._waiting = 0
        self._dropped = 0
        self._overwritten = 0  # part of `_dropped`: frames that made room for others
        self._admission = BackPressure().admission
        self._leaves_out = False
        self._closed: str | None = None
        self._turn_taken = (
            False  # a thread delivers frames: no other thread may take any until it has finished
        )
        self._reader_turn = False  # that thread is the reader
        self._note_emission = settled().note_emission
        self._ahead = 0  # the sequence number up to which `copy_ahead` has copied

    def configure(self, back_pressure: BackPressure) -> None:
        """See `Source`."""
        with self._changed:
            self._admission = back_pressure.admission
            self._changed.notify_all()  # emissions that wait for room

    def list_failures(self, count: int) -> None:
        """See `Source`: nothing is folded here."""

    def leave_out(self, on: bool) -> None:
        """See `Source`."""
        with self._changed:
            self._leaves_out = on

    def emit(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int = 0) -> None:
        """Appends a frame or drops it, as the policy says. Any thread but the reader's.

        Args:
            prefix: header and metadata of the message.
            arrays: its arrays, of the shapes and dtypes that the metadata names; they are copied.
            run_id: of the launch.
        """
        with self._changed:
            if self._leaves_out or not admit(self, self._admission):
                self._dropped += 1
                self._seq += 1
                return
            self._append(self._frame(prefix, arrays, run_id))

    def append(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], time_ns: int) -> None:
        """Appends a frame of a message that was emitted at `time_ns`, regardless of the policy. Any thread.

        `prefix` and `arrays` are as in `emit`.
        """
        with self._changed:
            self._append(self._frame(prefix, arrays, 0, time_ns))

    def post(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int = 0) -> None:
        """See `Source`."""
        with self._changed:
            self._append(self._frame(prefix, arrays, run_id))

    def call(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int = 0) -> _QueueBatch:
        """Appends the frame of a call, regardless of the policy, and takes it once all earlier frames are delivered.

        The calling thread, which must not be the reader, delivers the frame. The reader pauses until `end_read_call`.

        Raises:
            CallFailedError: `close_calls` has been called.
        """
        with self._changed:
            frame = self._frame(prefix, arrays, run_id)
            if self._closed is None:
                self._append(frame)
            try:
                self._changed.wait_for(lambda: self._closed is not None or self._in_front(frame))
            except BaseException:  # an interrupted wait: a frame that no thread takes would block the queue
                self._withdraw(frame)
                raise
            if self._closed is not None:
                self._withdraw(frame)
                raise CallFailedError(self._closed)
            self._turn_taken = True
            return _QueueBatch(self, [self._frames.popleft()])

    def end_read_call(self) -> None:
        """Lets the reader continue.

        The thread that received a frame from `call` calls it once the frame is delivered.
        """
        with self._changed:
            self._turn_taken = False
            self._changed.notify_all()

    def _in_front(self, frame: bytes) -> bool:
        return not self._turn_taken and self._frames[0] is frame

    def _withdraw(self, frame: bytes) -> None:
        # By identity, since `in` would compare all bytes. Absent if the calls were closed before it was appended.
        if any(queued is frame for queued in self._frames):
            self._frames.remove(frame)
            self._held_frames -= 1
            self._held_bytes -= len(frame)
            self._dropped += 1
            self._changed.notify_all()

    def close_calls(self, message: str) -> None:
        """See `Source`. Calls whose host functions already run are not interrupted."""
        with self._changed:
            self._closed = message
            self._changed.notify_all()

    def send_end(self, token: int) -> None:
        """See `Source`. Does not wait for room."""
        with self._changed:
            self._append(self._frame(encode_prefix(token, Flags.END_OF_STREAM, ()), (), 0))

    def _frame(
        self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int, time_ns: int | None = None
    ) -> bytes:
        return frame_from_prefix(
            prefix,
            arrays,
            seq=self._seq,
            time_ns=time.time_ns() if time_ns is None else time_ns,
            run_id=run_id,
            device=self.device,
            position=self._position,
        )

    def _append(self, frame: bytes) -> None:
        self._seq += 1
        self._position += len(frame)
        self._emitted_bytes += len(frame)
        self._held_frames += 1
        self._held_bytes += len(frame)
        self._frames.append(frame)
        self._note_emission()  # after it, so that a thread which finds this emission settled has waited for the frame
        self._changed.notify_all()

    @property
    def next_seq(self) -> int:
        """See `BoundedQueue`."""
        return self._seq

    def is_beyond_half(self) -> bool:
        """See `BoundedQueue`."""
        return 2 * self._held_bytes > self._capacity_bytes

    def overwrite_oldest(self) -> None:
        """See `BoundedQueue`. Drops frames that the reader has not taken, up to the first one that must not be lost."""
        while not self.has_room() and self._frames:
            # A call's program waits for the reply, and an END_OF_STREAM frame separates scopes: neither may
            # be lost.
            if decode_header(self._frames[0]).flags & (Flags.CALL | Flags.END_OF_STREAM):
                return
            self._held_frames -= 1
            self._held_bytes -= len(self._frames.popleft())
            self._dropped += 1
            self._overwritten += 1

    def has_room(self) -> bool:
        """See `BoundedQueue`."""
        return self._held_bytes < self._capacity_bytes

    def wait_for_room(self, timeout_sec: float | None) -> bool:
        """See `BoundedQueue`. Gives up the lock meanwhile."""
        self._waiting += 1
        try:
            if timeout_sec is not None:
                return self._changed.wait_for(self._makes_room, timeout_sec)
            while not self._changed.wait_for(self._makes_room, WARN_AFTER_SEC):
                logger.warning(
                    "device %d waits for its receiver: %d messages (%d bytes) are queued",
                    self.device,
                    self._held_frames,
                    self._held_bytes,
                )
            return True
        finally:
            self._waiting -= 1

    def _makes_room(self) -> bool:
        # The policy may be another one since the emission began to wait.
        if self._admission.steps & Step.OVERWRITE_OLDEST:
            self.overwrite_oldest()
        return self.has_room()

    def free(self, frames: int, held_bytes: int) -> None:
        """Returns room to the queue. Called by batches."""
        with self._changed:
            self._held_frames -= frames
            self._held_bytes -= held_bytes
            self._changed.notify_all()

    def read(self, timeout_sec: float | None, turn_from: int = 0) -> _QueueBatch | None:
        """See `Source`."""
        with self._changed:
            # The reader keeps its turn until it reads again: by then it has delivered the frames, and a call
            # may be taken.
            if self._reader_turn:
                self._turn_taken = self._reader_turn = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._readable() or self._woken, timeout_sec)
            if not self._readable():
                self._woken = False  # a wake that comes with frames ends the next wait
                return None
            self._turn_taken = self._reader_turn = True
            frames: list[bytes] = []
            nbytes = 0
            while self._frames and len(frames) < BATCH_FRAMES and nbytes < BATCH_BYTES:
                flags = decode_header(self._frames[0]).flags
                if frames and flags & (Flags.CALL | Flags.END_OF_STREAM):
                    break
                frames.append(self._frames.popleft())
                nbytes += len(frames[-1])
                if flags & Flags.END_OF_STREAM:
                    break
            return _QueueBatch(self, frames)

    def copy_ahead(self) -> CopiedBatch | None:
        """See `Source`."""
        frames: list[Frame] = []
        nbytes = 0
        with self._changed:
            for frame in self._frames:
                header = decode_header(frame)
                if header.flags & Flags.END_OF_STREAM or len(frames) >= BATCH_FRAMES or nbytes >= BATCH_BYTES:
                    break
                if header.seq >= self._ahead:
                    frames.append((frame, 0, None))
                    nbytes += len(frame)
                    self._ahead = header.seq + 1
        return CopiedBatch(frames) if frames else None

    def _readable(self) -> bool:
        # The thread that waits in `call` takes a call's frame, not the reader.
        return bool(self._frames) and not self._turn_taken and not self._call_in_front()

    def _call_in_front(self) -> bool:
        return bool(decode_header(self._frames[0]).flags & Flags.CALL)

    def wake(self) -> None:
        """See `Source`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def discarded(self) -> int:
        """See `Source`."""
        # Without the lock: one number, which the reader compares with its last look.
        return self._overwritten

    def counters(self) -> SourceCounters:
        """See `Source`."""
        with self._changed:
            return SourceCounters(
                emitted=self._seq - self._dropped + self._overwritten,
                dropped=self._dropped,
                emitted_bytes=self._emitted_bytes,
                queued_messages=self._held_frames,
                queued_bytes=self._held_bytes,
                waiting_producers=self._waiting,
                next_seq=self._seq,
                discarded=self._overwritten,
            )
