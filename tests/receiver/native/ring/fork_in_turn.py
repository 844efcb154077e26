"""Forks while one thread has the turn to deliver and another waits for it. The child reads with its own turn."""

from __future__ import annotations

import threading

from forks import in_child, send
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource

FORKS = 20
"""A single fork may come too late: the waiting thread takes the turn from one that keeps it for 3 ms."""


def read_in_turn(library, device, source):
    assert send(library, device, b"message") == native.EMITTED
    batch = source.read(30, turn_from=1)
    assert batch.count == 1
    batch.release()


def child(library, source):
    assert not library.hcb_delivery_turn_awaited(), "the parent's thread waits in the child"
    read_in_turn(library, 0, source)
    library.hcb_delivery_turn_give()


def main():
    library = native.load()
    sources = [RingSource.open(device) for device in range(2)]
    for _ in range(FORKS):
        read_in_turn(library, 0, sources[0])
        waiting = threading.Thread(
            target=lambda: (read_in_turn(library, 1, sources[1]), library.hcb_delivery_turn_give())
        )
        waiting.start()
        while waiting.is_alive() and not library.hcb_delivery_turn_awaited():
            pass
        in_child(lambda: child(library, sources[0]))
        library.hcb_delivery_turn_give()
        waiting.join()


if __name__ == "__main__":
    main()
