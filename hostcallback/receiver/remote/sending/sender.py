"""Sends streams, slice by slice, with a window of unacknowledged bytes, over one connection after another.

Has the interface of the transports that make these connections, and the waits between attempts to reach a collector.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hostcallback.receiver.errors import StreamRefusedError, TransportError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, StreamFolder

OnAck = Callable[[StreamOffset], None]
"""Called with the end of a stream's safely stored bytes, on any thread; never with an earlier position."""


class TransportStream(Protocol):
    """One stream that is being sent. One thread sends.

    Attributes:
        stored: end of the stored bytes when the connection was made. Earlier bytes need not be sent.
    """

    stored: StreamOffset

    def send(self, piece: SegmentSlice) -> None:
        """Sends one slice; slices of a segment follow each other without gaps. May return before the slice is stored.

        Raises:
            TransportError: the connection is broken.
        """

    def check(self) -> None:
        """Raises TransportError if the connection is broken."""

    def close(self) -> None:
        """Ends the sending. Neither raises nor waits."""


class Transport(Protocol):
    """A transport to one collector or broker."""

    def connect(self, key: StreamKey, on_ack: OnAck) -> TransportStream:
        """Starts to send a stream, or continues it.

        Raises:
            StreamRefusedError: the collector refuses the stream.
            TransportError: the collector cannot be reached at present.
        """

    def close(self) -> None:
        """Closes all connections."""


FIRST_BACK_OFF_SEC, LAST_BACK_OFF_SEC = 0.1, 10.0
REFUSED_SEC = 60.0
"""Seconds before a collector that refused is asked again: it may be restarted with other tokens, or with control."""

MAX_TOLD = 8
"""Different reasons that are logged until forwarding works again, each once."""

_random = random.Random()  # separate from the program's generator, which may be seeded


class BackOff:
    """The waiting times of one client. One thread."""

    def __init__(self) -> None:
        """No attempt has failed yet."""
        self.reset()

    def reset(self) -> None:
        """Starts again with the shortest time: an attempt has succeeded."""
        self._seconds = FIRST_BACK_OFF_SEC

    def next_sec(self) -> float:
        """Seconds to wait after a failed attempt."""
        wait_sec = _random.uniform(0.2, 1.0) * self._seconds
        self._seconds = min(2 * self._seconds, LAST_BACK_OFF_SEC)
        return wait_sec


LOOK_SEC = 0.25
"""Seconds for which the sender waits for more data before it checks whether the connection is broken."""


class SliceSource(Protocol):
    """A stream that a sender sends.

    Attributes:
        key: identifies the stream.
        sent_before: end of what another sender may have sent of it.
    """

    key: StreamKey
    sent_before: StreamOffset

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        """Returns the next slice from `position` on; None if none came in `timeout_sec`.

        The slice starts elsewhere if a new segment starts, or if the data at `position` was dropped.
        """

    def acked(self, position: StreamOffset) -> None:
        """Notes that everything before `position` is safely stored by the collector."""

    def is_sent(self) -> bool:
        """Whether the collector has stored all data so far."""


class Sender:
    """A thread that sends one stream until it is stopped or, for an orphan spool, until all is sent or it is refused.

    Attributes:
        refused: the reason for which the collector refuses the stream; empty if it does not.
    """

    def __init__(
        self,
        source: SliceSource,
        transport: Transport,
        *,
        window_bytes: int,
        ends: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            source: the stream.
            transport: to the collector or broker.
            window_bytes: limit of unacknowledged bytes.
            ends: whether the stream is complete, as an orphan's is.
            on_end: called by the thread before it ends.
        """
        self._source = source
        self._transport = transport
        self._window_bytes = window_bytes
        self._ends = ends
        self._on_end = on_end
        self.refused = ""
        self._changed = threading.Condition()  # protects everything below
        self._sent = source.sent_before
        self._on_way: deque[tuple[StreamOffset, int]] = deque()
        self._on_way_bytes = 0
        self._last_ack: StreamOffset | None = None
        self._is_stored = (
            False  # whether something was stored since the last connection's last acknowledgement
        )
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="hostcallback-forward", daemon=True)
        self._thread.start()

    def drain(self, timeout_sec: float) -> bool:
        """Waits until the collector has stored everything; False if the time is over or the stream is refused."""
        deadline = time.monotonic() + timeout_sec
        with self._changed:
            while not self._source.is_sent() and not self.refused and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, LOOK_SEC))
        return self._source.is_sent()

    def stop(self, timeout_sec: float = 5.0) -> None:
        """Ends the thread. Unsent data stays in the spool."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(timeout_sec)

    def _run(self) -> None:
        back_off, told = BackOff(), set[str]()

        def tell(level: int, error: Exception, then: str) -> None:
            # Another reason too, as where a collector is started again with another certificate.
            if str(error) not in told and len(told) < MAX_TOLD:
                told.add(str(error))
                logger.log(level, "%s cannot be forwarded at present: %s; %s", self._source.key, error, then)

        def note_progress() -> None:
            # A collector with a full disk takes every connection, and stores nothing.
            if not (self._is_stored or self._source.is_sent()):
                return
            if told:
                logger.warning("forwarding of %s works again", self._source.key)
            back_off.reset()
            told.clear()

        try:
            while not self._is_over():
                link: TransportStream | None = None
                began, refused_sec = time.monotonic(), 0.0
                try:
                    link = self._transport.connect(self._source.key, self._acked)
                    self.refused = ""
                    self._send(link, note_progress)
                except StreamRefusedError as error:
                    then = "" if self._ends else ", and the sender asks again every minute"
                    tell(logging.ERROR, error, f"unsent data stays in the spool{then}")
                    self.refused = str(error)
                    if self._ends:  # the orphans behind it wait, and the next process of the run tries again
                        return
                    refused_sec = REFUSED_SEC
                except (TransportError, OSError) as error:
                    self.refused = ""
                    if not self._is_over():
                        tell(logging.WARNING, error, "the sender retries")
                finally:
                    if link is not None:
                        link.close()
                # A connection that lasted was good: the next failure starts with the shortest pause again.
                if time.monotonic() - began > LAST_BACK_OFF_SEC:
                    back_off.reset()
                if not self._is_over():
                    self._wait(refused_sec or back_off.next_sec())
        finally:
            # In any case: the orphans behind this one wait for it.
            self._on_end()

    def _is_over(self) -> bool:
        return self._stop or (self._ends and self._source.is_sent())

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop, seconds)

    def _send(self, link: TransportStream, note_progress: Callable[[], None]) -> None:
        # Slices that were on the way of an earlier connection may be lost. They are sent again from `link.stored` on.
        with self._changed:
            self._on_way.clear()
            self._on_way_bytes = 0
            # The last connection may have stored more than it acknowledged.
            self._is_stored = self._last_ack is not None and link.stored > self._last_ack
        self._acked(link.stored)
        try:
            self._send_from(link.stored, link, note_progress)
        finally:
            note_progress()  # what was stored just before all is sent, or before the connection broke

    def _send_from(
        self, position: StreamOffset, link: TransportStream, note_progress: Callable[[], None]
    ) -> None:
        while not self._is_over():
            note_progress()
            link.check()
            piece = self._source.read(position, LOOK_SEC)
            if piece is None:
                if self._ends:
                    self._wait_for_acks()
                continue
            with self._changed:
                # A slice larger than the window is sent alone.
                while self._on_way_bytes and self._on_way_bytes + len(piece.data) > self._window_bytes:
                    # Not without limit: a broken connection brings no acknowledgement that would wake this
                    # thread.
                    self._changed.wait(LOOK_SEC)
                    link.check()
                    if self._stop:
                        return
                self._on_way.append((piece.end, len(piece.data)))
                self._on_way_bytes += len(piece.data)
                # Before it is sent: its acknowledgement may come before `send` returns.
                self._sent = max(self._sent, piece.end)
            link.send(piece)
            position = piece.end

    def _wait_for_acks(self) -> None:
        with self._changed:
            if self._on_way:
                self._changed.wait(LOOK_SEC)

    def _acked(self, position: StreamOffset) -> None:
        with self._changed:
            sent = self._sent
        # An acknowledgement deletes data from the spool, so a wrong one must not be believed.
        if position > sent:
            raise StreamRefusedError(
                f"it claims to have stored {tuple(position)}, and only what is before {tuple(sent)} was sent: it is "
                "not the collector of this stream, and nothing is deleted"
            )
        # Without the lock: it takes the spool's, with which the writer may wait for room.
        self._source.acked(position)
        with self._changed:
            self._last_ack = position
            while self._on_way and self._on_way[0][0] <= position:
                self._on_way_bytes -= self._on_way.popleft()[1]
                self._is_stored = True
            self._changed.notify_all()


class OrphanSender:
    """Sends orphan spools while the process's own sender works."""

    def __init__(self, folders: Sequence[StreamFolder], transport: Transport, *, window_bytes: int) -> None:
        """Starts to send.

        Args:
            folders: of the streams, locked by this process.
            transport: to the collector.
            window_bytes: limit of unacknowledged bytes.
        """
        self._transport = transport
        self._window_bytes = window_bytes
        self._changed = threading.Condition()  # protects everything below
        self._waiting = list(folders)
        self._sender: Sender | None = None
        self._ended = False
        self._go_on()

    def drain(self, timeout_sec: float) -> bool:
        """Waits until all are sent or refused; False if `timeout_sec` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sender is None, timeout_sec)

    def stop(self) -> None:
        """Ends the sending. Unsent spools are unlocked, so that another process can send them."""
        with self._changed:
            self._ended = True
            waiting, self._waiting = self._waiting, []
            sender = self._sender
        for folder in waiting:
            folder.release()
        if sender is not None:
            # Without the lock, which the ending sender takes in `_go_on`.
            sender.stop()

    def _go_on(self) -> None:
        # The lock is a Condition's, which is reentrant: a sender may end at once.
        with self._changed:
            self._sender = None
            while self._waiting and self._sender is None and not self._ended:
                self._sender = self._sender_of(self._waiting.pop(0))
            self._changed.notify_all()

    def _sender_of(self, folder: StreamFolder) -> Sender | None:
        try:
            source = OrphanSpool(folder)
        except Exception as error:  # whatever another process left there, this program goes on
            logger.warning("%s cannot be read: %s: %s", folder.path, type(error).__name__, error)
            folder.release()
            return None
        logger.info("forwarding the spool that the process of %s left", folder.key)

        def end() -> None:
            source.end()
            self._go_on()

        return Sender(source, self._transport, window_bytes=self._window_bytes, ends=True, on_end=end)
