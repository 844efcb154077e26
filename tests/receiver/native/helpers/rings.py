"""Rings with both of their sides: for the tests of the native transport."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingBatch, RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Header, decode_header, encode_prefix

# Rings live as long as the process, so that every test takes a new device. Real ordinals are far from these.
_devices = itertools.count(1_000_000)


class Received(NamedTuple):
    """One frame, copied out of the ring."""

    header: Header
    payload: bytes
    external: Any


class TestRing:
    """A ring with both of its sides."""

    __test__ = False

    def __init__(self, config: RingConfig) -> None:
        self.device = next(_devices)
        self.source = RingSource.open(self.device, config)
        self.library = native.load()
        self.handle = self.library.hcb_ring_get(self.device)

    def send(
        self, payload: bytes = b"12345678", consumer_id: int = 1, run_id: int = 0, flags: int = 0
    ) -> int:
        """Emits one uint8 array; waits if the policy requires it."""
        prefix = encode_prefix(consumer_id, flags, (ArraySpec.of(np.dtype(np.uint8), (len(payload),)),))
        address = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p))
        nbytes = (ctypes.c_uint64 * 1)(len(payload))
        return self.library.hcb_ring_send(self.handle, prefix, len(prefix), 1, address, nbytes, run_id)

    def fill(self, payload: bytes = b"12345678") -> int:
        """Sends until the ring is full (the policy must be a dropping one); returns the number of sent messages."""
        return next(count for count in itertools.count() if self.send(payload) == native.DROPPED)

    def produce(self, threads: int, count: int, nbytes: int) -> int:
        """Native threads that send `count` frames each; returns how many were emitted."""
        return self.library.hcb_test_produce(self.handle, threads, count, nbytes)

    def take(self, count: int, timeout_sec: float = 30.0) -> list[Received]:
        """Reads and releases until `count` frames have come."""
        received: list[Received] = []
        while len(received) < count:
            batch = self.source.read(timeout_sec)
            assert batch is not None, f"only {len(received)} of {count} frames came"
            received += unpack(batch)
            batch.release()
        return received

    def corrupt(self, offset: int, data: bytes) -> None:
        """Writes into the ring's memory."""
        memory = memoryview(self.source.memory)
        memory[offset : offset + len(data)] = data

    @property
    def counters(self) -> Any:
        """The source's counters."""
        return self.source.counters()


def unpack(batch: RingBatch) -> list[Received]:
    """Copies the frames of a batch."""
    received = []
    for memory, offset, external in batch.frames:
        header = decode_header(memory, offset)
        start = offset + 64 + (header.meta_bytes + 63) // 64 * 64
        payload = bytes(memory[start : start + header.payload_bytes]) if external is None else bytes(external)
        received.append(Received(header, payload, external))
    return received
