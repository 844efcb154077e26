"""Child process that drains its parent's rings until the parent stops it or dies."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostcallback.receiver.cli.reader_process.descriptor_registry import DescribedRegistry
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.processes import LOOK_SEC, stays_alive
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.isolated.ipc import IpcChannel, ReaderConfig
from hostcallback.receiver.runtime.isolated.options import ReaderOptions
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.taplog.flight.recorder import TAPS_FILE
from hostcallback.receiver.taplog.writing.recorder import Recorder, record

DRAIN_SEC = 30.0
"""Seconds that one message of a dead process may take before the rest is discarded."""


class RingReader:
    """The device receivers for another process's rings."""

    def __init__(self, order: ReaderConfig) -> None:
        """Starts the receivers.

        Raises:
            OSError: a ring cannot be opened, or the log cannot be created.
            HostCallbackError: messages cannot be forwarded.
        """
        self.order = order
        self.scope = Scope("reader process", order.max_errors, on_error=OnError(order.on_error))
        options = order.options
        self._recorder: Recorder | None = None
        if options.record is not None:
            self._recorder = record(options.record, process_index=options.process_index, run=options.run)
            self.scope.record_with(self._recorder)
        self._forwarder: Forwarder | None = None
        if options.forward is not None:
            self._forwarder = _forwarder(options, options.forward)
            self.scope.add_batch_sink(self._forwarder)
        self._sources = [RingSource.attach(Path(file)) for _, file in order.devices]
        registry = DescribedRegistry(Path(order.folder) / TAPS_FILE)
        self._receivers = [
            DeviceReceiver(
                name, name, source, registry, self.scope, before_release=self._write, continues_from=0
            )
            for (name, _), source in zip(order.devices, self._sources, strict=True)
        ]

    def _write(self) -> None:
        # Before their memory is released: the parent process does not have the messages any more after that.
        for sink in self.scope.batch_sinks:
            sink.write()

    def report(self) -> dict[str, Any]:
        """Reports statistics and failures so far; each failure is in one report only."""
        sys.stdout.flush()
        if self._recorder is not None:
            self._recorder.flush()
        return {"stats": self.scope.stats, "deferred": self.scope.deferred.export_pending()}

    def drain(self, timeout_sec: float) -> None:
        """Waits at most `timeout_sec` seconds until the collector has stored the delivered messages."""
        if self._forwarder is not None:
            self._forwarder.drain(timeout_sec)

    def finish(self, *, drain: bool = False, drain_sec: float | None = None) -> dict[str, Any]:
        """Ends the receivers and reports.

        The parent process receives the messages that they have not started to deliver.

        Args:
            drain: the receivers deliver these messages themselves.
            drain_sec: seconds to wait for the collector, if less than the forwarder's own.
        """
        if drain_sec is not None and self._forwarder is not None:
            self._forwarder.limit_drain(drain_sec)
        for receiver, source in zip(self._receivers, self._sources, strict=True):
            left = -1
            while not receiver.stop(DRAIN_SEC, drain=drain):
                before, left = left, source.counters().queued_bytes
                if left == before:
                    logger.error(
                        "%s: a tap has been running for %.0f s: %d bytes of messages are discarded",
                        receiver.name,
                        DRAIN_SEC,
                        left,
                    )
                    break
        report = self.report()
        if self._recorder is not None:
            self._recorder.close()
        if self._forwarder is not None:
            self._forwarder.close()
            report["forwarded"] = self._forwarder.outcome()
        return report

    def drain_after_parent_death(self) -> None:
        """Delivers the messages that remain in the rings of the dead parent process."""
        for source in self._sources:
            source.abandon()
        self.finish(drain=True)
        if self.order.remove:
            shutil.rmtree(self.order.folder, ignore_errors=True)
        error = self.scope.deferred.take()
        if error is not None:
            logger.error("errors in the remaining messages of process %d: %s", self.order.pid, error)


def _forwarder(options: ReaderOptions, forward: Forward) -> Forwarder:
    # The parent process is controlled, and answers for its taps.
    forward = replace(forward, control=False)
    return Forwarder(forward, process_index=options.process_index, local_devices=options.local_devices)


def serve(order: ReaderConfig, link: IpcChannel) -> None:
    """Delivers until the parent process ends it or has died."""
    reader = RingReader(order)
    if order.options.forward is not None:
        # On preemption, the parent has this process send the remaining messages; then the parent ends, and this one
        # after it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.send("ready")
    while True:
        try:
            said = link.receive(LOOK_SEC)
        except TimeoutError:
            if os.getppid() == order.pid:
                continue
            said = None
        if said is None:
            # The other end may also have been closed by a living process that reads its rings itself from now on.
            if stays_alive(order.pid):
                reader.finish()
            else:
                reader.drain_after_parent_death()
            return
        if said["kind"] == "report":
            reader.drain(said["drain_sec"])
            link.send("report", number=said["number"], **reader.report())
        else:
            link.send("end", **reader.finish(drain_sec=said.get("drain_sec")))
            return


def main(descriptor: int) -> None:
    """Receives its configuration through a socket that the parent opened, and serves."""
    # Keys pressed at the terminal, and its closing, are meant for the program. This process ends when the program's
    # rings are drained.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", level=logging.WARNING)
    link = IpcChannel(socket.socket(fileno=descriptor))
    said = link.receive()
    if said is not None:
        threading.current_thread().name = "hostcallback-reader"
        serve(said["order"], link)
