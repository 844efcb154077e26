"""Runs the part of a collector that fetches from NATS, on a thread, beside whatever else it serves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from receiver.remote.nats.collector import NatsCollector

END_SEC = 30.0


@contextlib.contextmanager
def fetching(collector: NatsCollector, on_connected: Callable[[], None]) -> Iterator[None]:
    """Within it, the collector fetches and stores; `on_connected` is called when it does for the first time."""
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
    """Waits for SIGTERM or SIGINT, which end a collector that does nothing else. Only from the main thread."""
    end = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    end.wait()
    for number, handler in before.items():  # the second time it ends at once
        signal.signal(number, handler)
