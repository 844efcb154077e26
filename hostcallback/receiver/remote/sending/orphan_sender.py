"""Sends the orphan spools of a run, which dead processes left, one stream after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.sending.sender import Sender
from hostcallback.receiver.remote.sending.transport import Transport
from hostcallback.receiver.remote.spool.directory import StreamFolder
from hostcallback.receiver.remote.spool.orphan_spool import OrphanSpool


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
