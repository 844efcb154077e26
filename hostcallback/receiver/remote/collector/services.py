"""The services that bring streams into a collector; they run until the process is told to end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hostcallback.receiver.remote.streams import StreamKey, StreamOffset
from hostcallback.receiver.text import representation

LOOK_SEC = 0.2
"""Seconds after which the main thread looks whether a signal has come."""

END_SEC = 30.0
"""How long a service may take to end."""

Grown = Callable[[StreamKey, StreamOffset], None]
"""Called when more of a stream is stored, on the thread of the service, which must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFrom:
    """Where a broker is, and what to take from it.

    Attributes:
        url: with the broker's scheme.
        run: only of this run; of all for the empty text.
        token: that the broker asks for; empty for none.
        tls_ca: a file with the certificates that the broker's is checked by; None for the system's.
        insecure: whether the token may go to another machine without TLS.
    """

    url: str
    run: str = ""
    token: str = ""
    tls_ca: str | os.PathLike[str] | None = None
    insecure: bool = False

    def __repr__(self) -> str:
        """The fields, without the token and without passwords."""
        return representation(self, urls=("url",), secrets=("token",))


class CollectingService(Protocol):
    """Stores streams in the collector's folder, and acknowledges what is stored."""

    @property
    def where(self) -> str:
        """For messages: "at HOST:PORT" or "from URL", without a password."""

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Collects until `end` is called. On a thread that does nothing else.

        Args:
            on_ready: called once, when streams can come for the first time.

        Raises:
            RemoteError: it cannot begin. What fails later is logged and tried again.
        """

    def end(self) -> None:
        """Makes `serve` return soon; everything stored is acknowledged first. Any thread."""


def _first(events: queue.SimpleQueue[bool]) -> bool:
    # Looks again and again: a signal that another thread of the process received does not wake this one, in which
    # Python runs the handlers.
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=LOOK_SEC)


def run_until_told(
    services: Sequence[CollectingService], on_ready: Callable[[CollectingService], None]
) -> None:
    """Runs services until SIGTERM or SIGINT, or until one fails. Only from the main thread.

    A second signal ends the process without waiting for the services.

    Raises:
        Exception: what a service raised.
    """
    # Signal handlers put into it, too: other means of waiting could be locked by the thread that the signal interrupts.
    events: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: a signal; False: a service has ended
    failures: list[Exception] = []

    def serve(service: CollectingService) -> None:
        try:
            service.serve(lambda: on_ready(service))
        except Exception as error:
            failures.append(error)
        finally:
            events.put(False)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: events.put(True)) for number in numbers}
    try:
        for service in services:
            threading.Thread(
                target=serve, args=(service,), name="hostcallback-collector", daemon=True
            ).start()
        running = len(services) - (not _first(events))
        for service in services:
            service.end()
        deadline = time.monotonic() + END_SEC
        while running:
            try:
                told = events.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            if told:
                break
            running -= 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
