"""Runs a NATS collector on a thread, while the main thread serves other clients or waits for a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from receiver.remote.nats.collector import NatsCollector

END_SEC = 30.0


@contextlib.contextmanager
def fetching(collector: NatsCollector, on_connected: Callable[[], None]) -> Iterator[None]:
    """Runs the collector while the context is entered. `on_connected` is called after its first connection."""
    thread = threading.Thread(
        target=collector.serve, args=(on_connected,), name="hostcallback-nats-collector", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        collector.stop.set()
        thread.join(END_SEC)


def wait_for_end() -> None:
    """Waits for SIGTERM or SIGINT, for a collector that serves nothing else. Main thread only."""
    end = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    end.wait()
    for number, handler in before.items():  # a second signal ends the process at once
        signal.signal(number, handler)
