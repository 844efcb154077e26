"""Forwards this process's taps: its spool, and the threads that send the spool and those of dead processes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.brokers import load
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.sender import OrphanSender, Sender, Transport
from hostcallback.receiver.remote.spool.spool import Spool
from hostcallback.receiver.remote.spool.spool_folders import find_orphans, left_by_other_runs
from hostcallback.receiver.taplog.writing.recorder import Recorder


class Forwarder(Recorder):
    """Forwards each message that it is called with to a collector, through a spool. Any thread.

    Attributes:
        options: of the forwarding.
    """

    def __init__(
        self,
        options: Forward,
        *,
        process_index: int | None = None,
        local_devices: Mapping[str, int] | None = None,
        job: str = "",
        transport: Transport | None = None,
    ) -> None:
        """Creates the spool, and starts to send the spools that dead processes of the run left.

        Args:
            options: address, run, spool and access.
            process_index: of this process in a program of several.
            local_devices: index of each device among this process's own, by name.
            job: identifies one run of the program, equal in all its processes.
            transport: to the collector; by default the one for the address in the options.

        Raises:
            SpoolError: the spool's folder belongs to another user, or cannot be written to.
            RemoteError: a file is not a certificate or a key.
            OSError: a file cannot be read.
        """
        self.options = options
        self._drain_sec = options.drain_sec
        self._says_unsent = True
        self._transport: Transport = transport or load(options.broker.transport)(options)
        try:
            self._spool = Spool(options, process_index=process_index, local_devices=local_devices, job=job)
        except BaseException:
            self._transport.close()
            raise
        super().__init__(self._spool.log)
        self._spool.on_closed = self._end
        self._control = None
        if options.control and options.broker.control:
            self._control = load(options.broker.control)(self._transport, self._spool.key)
        # After the control, and the orphans last: each needs the transport, and this process's own messages
        # go first.
        self._sender = Sender(self._spool, self._transport, window_bytes=options.window_bytes)
        left = find_orphans(options.folder, self._spool.key.run)
        self._left = OrphanSender(left, self._transport, window_bytes=options.window_bytes)
        for other, nbytes in left_by_other_runs(options.folder, self.run).items():
            logger.warning(
                "%s has %d bytes of the run %s, which ended before they were sent. This run, %s, does not send them: "
                "a program with HOSTCALLBACK_RUN=%s continues that run, and does",
                options.folder, nbytes, other, self.run, other,
            )  # fmt: skip

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._spool.key.run

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the spool that the collector has not acknowledged."""
        return self._spool.waiting_bytes

    @property
    def refused(self) -> str:
        """The reason for which the collector refuses the stream; empty if it does not."""
        return self._sender.refused

    def missing(self) -> list[str]:
        """Says which messages the collector does not have, and why; nothing if it has all."""
        found = []
        counters, unsent_bytes = self.counters, self.unsent_bytes
        if counters.lost_messages:
            found.append(
                f"{counters.lost_messages} message(s) were not forwarded: {counters.failure}. The collector is told "
                "which"
            )
        if unsent_bytes:
            why = self.refused or f"the collector at {self.options.shown_address} did not take them in time"
            found.append(
                f"{unsent_bytes} bytes of messages were not forwarded yet: {why}. They stay in "
                f"{self._spool.folder.path}; the next process of the run {self.run!r} sends them"
            )
        return found

    def drain(self, timeout_sec: float) -> bool:
        """Writes queued messages and waits until the collector has stored all; False if `timeout_sec` passes first."""
        self.flush()
        return self._sender.drain(timeout_sec)

    def limit_drain(self, seconds: float) -> None:
        """Makes the end wait for the collector for at most these seconds. The caller reports what is not sent then."""
        self._drain_sec = min(self._drain_sec, seconds)
        self._says_unsent = False

    def _end(self) -> None:
        # Called when the spool is closed, after its last message.
        # One limit for all steps: the program must not wait that long for each of them.
        deadline = time.monotonic() + self._drain_sec
        sent = self._sender.drain(self._drain_sec)
        self._sender.stop()
        if sent:
            self._left.drain(deadline - time.monotonic())
        self._left.stop()
        if self._control is not None:
            self._control.stop()
        self._transport.close()
        # After the senders have ended, since they read in this folder.
        own = self._spool.folder
        if sent and self._spool.is_sent():
            own.remove()
            return
        own.release()
        if not self._says_unsent:
            return
        logger.warning(
            "%d bytes were not forwarded in time; they stay in %s, and the next process of the run %s sends them",
            self._spool.waiting_bytes, own.path, own.key.run,
        )  # fmt: skip
