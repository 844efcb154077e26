"""A process that emits into a ring in a file until it is killed: `kept_ring.py FILE CAPACITY THREADS PAYLOAD READS`."""

from __future__ import annotations

import os
import sys
import threading

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig

path, capacity, threads, nbytes, reads = sys.argv[1], *map(int, sys.argv[2:])
library = native.load()
config = RingConfig(capacity_bytes=capacity, block_budget_bytes=1 << 20)
source = RingSource.open(4242, config)
ring = library.hcb_ring_get(4242)
if library.hcb_ring_keep_in_file(ring, os.fsencode(path), b"cpu:7", 1 << 20):
    sys.exit("the ring could not be put into a file")


def deliver() -> None:
    """Reads and gives back, as a receiver does."""
    while True:
        batch = source.read(None)
        if batch is not None:
            batch.release()


def tell_first() -> None:
    """Says when the first message is in the ring."""
    while not source.counters().emitted:
        threading.Event().wait(0.001)
    print("started", flush=True)


if reads:
    threading.Thread(target=deliver, daemon=True).start()
threading.Thread(target=tell_first, daemon=True).start()
library.hcb_test_produce(ring, threads, 1 << 60, nbytes)
