"""The reader process as seen by its parent: starts it, queries it, stops it, and takes over if it dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.isolated.ipc import IpcChannel, ReaderConfig
from hostcallback.receiver.runtime.isolated.options import NO_OPTIONS, ForwardingReport, ReaderOptions
from hostcallback.receiver.runtime.isolated.ring_handover import HandedOverRings

START_SEC = 60.0
"""Seconds that the child process may take to start."""

ANSWER_SEC = 10.0
"""Seconds that the child process may take to report after it has delivered all messages."""

INTERRUPTED_SEC = 1.0
"""The same after an interrupt."""


class ReceiverProcess:
    """A child process that delivers portable taps of some devices: those that need no object of this process.

    Any thread.

    Attributes:
        rings: rings that it reads.
        forwarded: report on the messages that it had to forward; None until it has ended.
    """

    def __init__(
        self,
        rings: HandedOverRings,
        registry: Registry,
        scope: Scope,
        *,
        options: ReaderOptions = NO_OPTIONS,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the child process and routes the taps to it.

        Args:
            rings: rings that it reads.
            registry: the consumers of this process.
            scope: scope that counts the messages it delivers.
            options: how it records and forwards the messages in addition.
            on_death: called if it ends without being told to.

        Raises:
            OSError: the child process cannot be started.
        """
        self.rings = rings
        self.forwarded: ForwardingReport | None = None
        self._on_death = on_death
        self._end_sec = ANSWER_SEC + (0.0 if options.forward is None else options.forward.drain_sec)
        self._scope = scope
        self._changed = threading.Condition()  # protects everything below
        self._reports = 0
        self._answered = 0
        self._ready = self._gone = self._ending = False
        files = [(name, str(file)) for name, file in rings.files.items()]
        order = ReaderConfig(
            str(rings.folder), os.getpid(), files, options, scope.deferred.max_kept, str(scope.deferred.on_error),
            remove=True,
        )  # fmt: skip
        try:
            self._process, self._link = _start(order)
        except BaseException:
            rings.end()
            raise
        self._listener = threading.Thread(target=self._listen, name="hostcallback-reader", daemon=True)
        self._listener.start()
        # Taps are routed only after that: until the child reads, their messages would wait in its rings.
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._gone, START_SEC)
            if not self._ready:
                # First, so that the listener does not report the death and start to deliver in place of the
                # child.
                self._ending = True
                self._process.kill()
                raise OSError(
                    f"the receiver's process did not start (exit status {self._process.wait()}): "
                    "its standard error says why"
                )
        rings.route(registry, self._wanted)

    def _wanted(self, consumer: Consumer) -> bool:
        if not consumer.is_portable:
            return False
        # A check that raises in this process, or ends one of its programs, must be delivered in this process.
        return not consumer.is_check or self._scope.deferred.on_error in (OnError.DEFER, OnError.WARN)

    @property
    def pid(self) -> int:
        """Process id of the child process."""
        return self._process.pid

    def collect(self) -> None:
        """Makes the child process report its statistics and errors, which are added to the scope."""
        self.drain(0.0)

    def drain(self, timeout_sec: float) -> bool:
        """Makes the child process wait until the collector has all forwarded messages, then report like `collect`.

        It waits at most `timeout_sec`. Returns whether the report came, or the child process has ended.
        """
        with self._changed:
            if self._gone:
                return True
            self._reports += 1
            number = self._reports
        if self._link.send("report", number=number, drain_sec=timeout_sec):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._answered >= number or self._gone, ANSWER_SEC + timeout_sec
                )
        return self._answered >= number

    def stop(self, drain_sec: float | None = None) -> None:
        """Ends the child process. This process delivers all later messages.

        `drain_sec`: seconds that it may wait for the collector, after an interrupt: soon after these it is killed.
        """
        end_sec = self._end_sec if drain_sec is None else drain_sec + INTERRUPTED_SEC
        with self._changed:
            gone, self._ending = self._gone, True
        if not gone:
            self._link.send("end", drain_sec=drain_sec)
            with self._changed:
                gone = self._changed.wait_for(lambda: self._gone, end_sec)
        self._link.close()
        try:
            self._process.wait(end_sec if gone else INTERRUPTED_SEC)  # one that does not answer may be stuck
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        while True:
            said = self._link.receive()
            if said is not None:
                self._take(said)
            if said is None or said["kind"] == "end":
                break
        # The child has closed the channel or is about to exit. Its rings may be taken back only once it is dead.
        status = self._process.wait()
        with self._changed:
            unexpected = not self._ending and self._ready
        if unexpected:
            logger.warning(
                "the receiver's process %d ended (exit status %d): its taps are delivered in this process from now on",
                self.pid,
                status,
            )
        # First takes the rings back, then wakes waiting threads: they count what this process still has to deliver.
        self.rings.end()
        if unexpected:
            self._on_death()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _take(self, said: dict[str, Any]) -> None:
        if said["kind"] != "ready":
            self._scope.set_remote_stats(self, said["stats"])
            self._scope.deferred.merge(said["deferred"])
        self.forwarded = said.get("forwarded")
        with self._changed:
            self._ready = self._ready or said["kind"] == "ready"
            self._answered = max(self._answered, said.get("number", 0))
            self._changed.notify_all()


def _start(order: ReaderConfig) -> tuple[subprocess.Popen[bytes], IpcChannel]:
    ours, theirs = socket.socketpair()
    # Not from this file's own place: a checkout has a link to it, an installation has not.
    (package,) = sys.modules["hostcallback"].__path__
    path = os.pathsep.join(
        filter(None, [str(Path(package).absolute().parent), os.environ.get("PYTHONPATH", "")])
    )
    line: Sequence[str] = [
        sys.executable,
        "-m",
        "hostcallback.receiver.cli.reader_process",
        str(theirs.fileno()),
    ]
    try:
        process = subprocess.Popen(
            line, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    link = IpcChannel(ours)
    link.send("order", order=order)
    return process, link
