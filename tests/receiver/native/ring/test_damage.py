"""A ring with overwritten memory: the reader reports it with counts and skips it, and no thread hangs."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring_batch import CorruptRingError

pytestmark = pytest.mark.native_only

SMALL = 192
ROOM = 4096 // SMALL

DAMAGES = {
    "bad magic": (0, b"XYZ"),
    "unknown wire format version": (3, b"\2"),
    "unknown flags": (4, b"\0\0\1\0"),
    "names another position": (56, struct.pack("<Q", 64)),
    "length beyond": (48, struct.pack("<Q", 1 << 62)),
    "length beyond the queued": (44, struct.pack("<I", 1 << 20)),
}


def read_damage(ring) -> CorruptRingError:
    with pytest.raises(CorruptRingError) as caught:
        ring.source.read(10)
    return caught.value


@pytest.mark.parametrize("reason", DAMAGES)
def test_the_frames_around_the_damage_arrive(ring, reason):
    offset, data = DAMAGES[reason]
    for i in range(6):
        ring.send(bytes([i]))
    ring.corrupt(2 * SMALL + offset, data)
    assert [r.payload for r in ring.take(2)] == [b"\0", b"\1"]
    error = read_damage(ring)
    assert reason in str(error)
    assert str(2 * SMALL) in str(error)
    assert (error.skipped, error.start, error.end) == (1, 2 * SMALL, 3 * SMALL)
    assert [r.payload for r in ring.take(3)] == [b"\3", b"\4", b"\5"]
    assert ring.counters.queued_messages == ring.counters.queued_bytes == 0


def test_frames_behind_a_damaged_end_arrive(ring):
    ring.send(b"lost")
    ring.corrupt(0, bytes(SMALL))
    error = read_damage(ring)
    assert (error.skipped, error.end) == (1, SMALL)
    assert ring.source.read(0) is None
    ring.send(b"next")
    assert ring.take(1)[0].payload == b"next"
    assert ring.counters.queued_messages == 0


def test_the_count_of_lost_messages_leaves_out_dropped_ones(make_ring):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    ring.fill()
    ring.take(ROOM)
    for _ in range(5):  # behind one drop
        ring.send()
    ring.corrupt(0, bytes(4096))
    assert read_damage(ring).skipped == 5
    counters = ring.counters
    assert (counters.emitted, counters.dropped, counters.queued_messages) == (ROOM + 5, 1, 0)


def test_several_damaged_stretches_are_counted_together(ring):
    for i in range(8):
        ring.send(bytes([i]))
    ring.corrupt(1 * SMALL, b"?")
    ring.corrupt(5 * SMALL, b"?")
    assert ring.take(1)[0].payload == b"\0"
    first = read_damage(ring)
    assert [r.payload for r in ring.take(3)] == [b"\2", b"\3", b"\4"]
    second = read_damage(ring)
    assert [r.payload for r in ring.take(2)] == [b"\6", b"\7"]
    assert first.skipped + second.skipped == 2


def test_producers_that_wait_behind_the_damage_go_on(ring, stalls):
    for _ in range(ROOM):
        ring.send()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"waited")
        stalls(ring.device)
        ring.corrupt(0, bytes(4096))
        assert read_damage(ring).skipped == ROOM
        assert waiting.result(30) == native.EMITTED
    assert ring.take(1)[0].payload == b"waited"


def test_blocks_in_the_damaged_stretch_are_freed(make_ring):
    ring = make_ring(block_budget_bytes=10_000, policy=Policy.DROP_NEWEST)
    assert ring.send(bytes(10_000)) == native.EMITTED
    assert ring.send(bytes(10_000)) == native.DROPPED
    ring.corrupt(0, b"?")
    assert read_damage(ring).skipped == 1
    assert ring.counters.queued_bytes == 0
    assert ring.send(bytes(10_000)) == native.EMITTED
    ring.take(1)


@pytest.mark.parametrize("offset", [128, 136])
def test_a_descriptor_of_memory_that_is_not_ours_is_never_followed(ring, offset):
    ring.send(bytes(10_000))
    ring.send(b"next")
    ring.corrupt(offset, struct.pack("<Q", 4096))
    error = read_damage(ring)
    assert "unknown payload block" in str(error)
    assert error.skipped == 1
    assert ring.take(1)[0].payload == b"next"


def test_a_copy_of_a_header_does_not_pass_for_a_frame(ring):
    ring.send(b"old")
    old_header = bytes(ring.source.read(1).frames[0][0][:64])
    ring.source._batch.release()
    ring.send(old_header + b"!")  # at a 64-byte boundary, as a real one would be
    ring.send(b"next")
    ring.corrupt(SMALL, b"?")
    assert read_damage(ring).skipped == 1
    assert ring.take(1)[0].payload == b"next"
