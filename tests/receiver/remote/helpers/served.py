"""A collector on a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hostcallback.receiver.remote.collector.access import Access, Limits
from hostcallback.receiver.remote.collector.service import Collector, CollectorServer
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.control.relay import ControlService


class Served(NamedTuple):
    """A collector that listens."""

    store: Store
    server: CollectorServer
    address: str


@contextmanager
def served(
    folder: Path,
    *,
    access: Access | None = None,
    limits: Limits | None = None,
    fsync: bool = False,
    port: int = 0,
) -> Iterator[Served]:
    """Serves from a folder until the end of the context; also ends when the test has ended the server."""
    store = Store(folder, fsync=fsync)
    control = ControlService(store.directory, access=access, limits=limits)
    collector = Collector(store, access=access, limits=limits)
    server = CollectorServer(collector, f"localhost:{port}", handlers=(control.handlers(),))
    listens = threading.Event()
    thread = threading.Thread(target=server.serve, args=(listens.set,))
    thread.start()
    try:
        assert listens.wait(30)
        yield Served(store, server, server.where.removeprefix("at "))
    finally:
        server.end()
        thread.join()
        store.close()
