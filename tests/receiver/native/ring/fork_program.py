"""Forks with frames queued, blocks outstanding and a producer waiting, and checks both sides."""

from __future__ import annotations

import threading

from forks import in_child, read_all, send
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig


def child(library, source):
    counters = source.counters()
    assert (counters.emitted, counters.next_seq, counters.queued_messages, counters.queued_bytes) == (
        0,
        0,
        0,
        0,
    )
    assert counters.waiting_producers == 0
    assert source.read(0) is None, "the parent's frames were delivered again"
    event = native.Event()
    assert not library.hcb_supervise_wait(0, event)
    thread = threading.Thread(target=lambda: [send(library, 0, bytes([i]) * 100) for i in range(200)])
    thread.start()
    assert read_all(source, 200) == [(i, bytes([i]) * 100) for i in range(200)]
    thread.join()
    assert send(library, 0, bytes(5000)) == native.EMITTED
    assert read_all(source, 1) == [(200, bytes(5000))]


def main():
    library = native.load()
    source = RingSource.open(0, RingConfig(capacity_bytes=4096))
    assert send(library, 0, b"x" * 5000) == native.EMITTED
    for i in range(20):
        send(library, 0, bytes([i]))
    waiting = threading.Thread(target=send, args=(library, 0, b"waited"))
    waiting.start()
    event = native.Event()
    while not (library.hcb_supervise_wait(30_000_000_000, event) and event.kind == native.EVENT_STALL):
        pass
    in_child(lambda: child(library, source))
    expected = [b"x" * 5000, *(bytes([i]) for i in range(20)), b"waited"]
    assert read_all(source, 22) == list(enumerate(expected))
    waiting.join()


if __name__ == "__main__":
    main()
