"""The ring: order, wrapping, back-pressure, waking and counting, with real threads on both sides."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix

pytestmark = pytest.mark.native_only

SMALL = 192  # bytes in the ring of a frame with metadata and up to 64 bytes


def test_frames_arrive_in_order_with_their_payloads(ring):
    before = time.time_ns()
    for i in range(10):
        assert ring.send(bytes([i]) * i, consumer_id=100 + i, run_id=i) == native.EMITTED
    received = ring.take(10)
    assert [r.payload for r in received] == [bytes([i]) * i for i in range(10)]
    for i, (header, _, external) in enumerate(received):
        assert (header.consumer_id, header.seq, header.run_id) == (100 + i, i, i)
        assert header.device == ring.device
        assert header.flags == 0
        assert external is None
        assert before <= header.time_ns <= time.time_ns()


@pytest.mark.parametrize("nbytes", [1, 8, 63, 64, 65, 200, 601])
def test_frames_never_wrap_whatever_their_size(ring, nbytes):
    count = 500
    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(ring.produce, 1, count, nbytes)
        received = ring.take(count)
    assert produced.result() == count
    for i, (header, payload, _) in enumerate(received):
        assert header.seq == i
        assert payload == i.to_bytes(8, "little")[:nbytes] + bytes([i & 255]) * (nbytes - 8)
        assert header.position % 4096 + header.frame_bytes <= 4096


def test_many_producers_lose_nothing_and_keep_their_order(ring):
    threads, count = 8, 2000
    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(ring.produce, threads, count, 24)
        received = ring.take(threads * count)
    assert produced.result() == threads * count
    assert [r.header.seq for r in received] == list(range(threads * count))
    for thread in range(threads):
        own = [int.from_bytes(r.payload[:8], "little") for r in received if r.header.consumer_id == thread]
        assert own == list(range(count))
    counters = ring.counters
    assert (counters.emitted, counters.dropped, counters.next_seq) == (16000, 0, 16000)
    assert (counters.queued_messages, counters.queued_bytes, counters.waiting_producers) == (0, 0, 0)


def test_a_blocked_producer_goes_on_as_soon_as_there_is_room(ring, stalls):
    room = 4096 // SMALL
    for i in range(room):
        ring.send(bytes([i]))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"waited")
        stalls(ring.device)
        assert ring.counters.waiting_producers == 1
        assert not waiting.done()
        received = ring.take(room + 1)
        assert waiting.result() == native.EMITTED
    assert received[-1].payload == b"waited"
    assert [r.header.seq for r in received] == list(range(room + 1))


def test_releasing_part_of_a_batch_makes_room(ring, stalls):
    room = 4096 // SMALL
    for _ in range(room):
        ring.send()
    batch = ring.source.read(1)
    assert len(batch.frames) == room
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send)
        stalls(ring.device)
        batch.release(3)
        assert waiting.result() == native.EMITTED
    assert ring.counters.queued_messages == room + 1 - 3
    batch.release(2)  # already released
    assert ring.counters.queued_messages == room + 1 - 3
    batch.release()
    batch.release()
    assert ring.counters.queued_messages == 1
    ring.take(1)
    assert ring.counters.queued_bytes == 0


def test_the_queue_of_waiting_producers_keeps_their_order(ring, stalls):
    room = 4096 // SMALL
    for _ in range(room):
        ring.send()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"first")
        stalls(ring.device)
        # These would fit sooner or later, but not before the waiting frame.
        ring.source.send_end(7)
        ring.source.send_end(8)
        assert ring.counters.waiting_producers == 3
        received = ring.take(room + 3)
        assert waiting.result() == native.EMITTED
    assert received[-3].payload == b"first"
    assert [r.header.consumer_id for r in received[-2:]] == [7, 8]
    assert all(r.header.flags == Flags.END_OF_STREAM for r in received[-2:])


def test_drop_newest_counts_every_drop_and_leaves_gaps(make_ring):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    room = ring.fill()
    assert room == 4096 // SMALL
    for _ in range(9):
        assert ring.send() == native.DROPPED
    assert (ring.counters.dropped, ring.counters.next_seq) == (10, room + 10)
    assert [r.header.seq for r in ring.take(room)] == list(range(room))
    ring.send(b"next")
    assert ring.take(1)[0].header.seq == room + 10


def test_block_then_drop_waits_for_the_timeout_only(make_ring):
    ring = make_ring(policy=Policy.BLOCK_THEN_DROP, timeout_sec=0.02)
    start = time.monotonic()
    ring.fill()
    assert time.monotonic() - start >= 0.02
    assert (ring.counters.dropped, ring.counters.waiting_producers) == (1, 0)


def test_block_then_drop_loses_no_message_that_finds_room_in_time(make_ring, stalls):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    room = ring.fill()
    ring.source.configure(RingConfig(policy=Policy.BLOCK_THEN_DROP, timeout_sec=60))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"in time")
        stalls(ring.device)
        received = ring.take(room + 1)
        assert waiting.result() == native.EMITTED
    assert received[-1].payload == b"in time"


def test_a_timed_out_producer_makes_way_for_a_smaller_one(make_ring, stalls):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    ring.fill()
    batch = ring.source.read(1)
    batch.release(2)
    ring.source.configure(RingConfig(policy=Policy.BLOCK_THEN_DROP, timeout_sec=0.2))
    with ThreadPoolExecutor(1) as pool:
        big = pool.submit(ring.send, bytes(700))
        stalls(ring.device)
        ring.source.send_end(5)  # would fit, but is queued behind
        assert big.result() == native.DROPPED
    assert ring.counters.waiting_producers == 0
    batch.release()
    assert ring.take(1)[0].header.consumer_id == 5


def test_sample_keeps_every_nth_beyond_half_full(make_ring):
    ring = make_ring(policy=Policy.SAMPLE, sample_every=4)
    half = 4096 // 2 // SMALL + 1
    outcome = [ring.send() for _ in range(half + 16)]
    assert outcome[:half] == [native.EMITTED] * half
    assert Counter(outcome[half:]) == {native.EMITTED: 4, native.DROPPED: 12}
    assert ring.counters.dropped == 12


def test_the_policy_can_change_while_a_producer_waits(make_ring, stalls):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    room = ring.fill()
    ring.source.configure(RingConfig(policy=Policy.BLOCK))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"waited")
        stalls(ring.device)
        ring.source.configure(RingConfig(policy=Policy.DROP_NEWEST))
        assert ring.send(b"newest") == native.DROPPED
        assert not waiting.done()
        received = ring.take(room + 1)
        assert waiting.result() == native.EMITTED
    assert received[-1].payload == b"waited"


def test_metadata_that_can_never_fit_is_refused(ring):
    prefix = encode_prefix(1, 0, [ArraySpec(6, (0,))] * 1000)
    assert ring.library.hcb_ring_append(ring.handle, prefix, len(prefix)) == native.TOO_LARGE
    assert ring.counters.next_seq == 0


@pytest.mark.parametrize("prefix", [b"", bytes(63), bytes(128), bytes(44) + b"\1\0\0\0" + bytes(16)])
def test_a_prefix_that_contradicts_itself_is_refused(ring, prefix):
    assert ring.library.hcb_ring_append(ring.handle, prefix, len(prefix)) == native.INVALID


def test_read_returns_none_at_its_timeout(ring):
    assert ring.source.read(0) is None
    start = time.monotonic()
    assert ring.source.read(0.02) is None
    assert time.monotonic() - start >= 0.02


def test_wake_ends_a_read_that_waits(ring):
    started = threading.Event()

    def read():
        started.set()
        return ring.source.read(None)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            started.clear()
            reading = pool.submit(read)
            started.wait()
            ring.source.wake()
            assert reading.result(30) is None


def test_wake_is_kept_for_the_next_read_that_would_wait(ring):
    ring.source.wake()
    ring.send()
    ring.take(1)
    assert ring.source.read(None) is None
    assert ring.source.read(0) is None


def test_a_sleeping_reader_uses_no_processor_time(ring):
    for _ in range(10):
        ring.send()
    ring.take(10)
    before = time.thread_time()
    assert ring.source.read(0.3) is None
    assert time.thread_time() - before < 0.03


@pytest.mark.slow
def test_a_sleeping_reader_is_woken_by_every_message(make_ring, ring):
    answers = make_ring()
    count = 500

    def answer():
        for _ in range(count):
            assert len(ring.take(1)) == 1
            answers.send()

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        for _ in range(count):
            ring.send()
            answers.take(1)
        answering.result()


def test_a_batch_must_be_released_before_the_next_read(ring):
    ring.send()
    ring.send()
    batch = ring.source.read(1)
    with pytest.raises(RuntimeError, match="previous batch"):
        ring.source.read(1)
    batch.release(1)
    with pytest.raises(RuntimeError, match="previous batch"):
        ring.source.read(1)
    batch.release()
    assert ring.source.read(0) is None


def test_batches_are_bounded(make_ring):
    ring = make_ring(capacity_bytes=8 << 20)
    for _ in range(1500):
        ring.send()
    batch = ring.source.read(1)
    assert len(batch.frames) == 1024
    batch.release()
    ring.take(476)
    for _ in range(100):
        ring.send(bytes(60_000))
    batch = ring.source.read(1)
    assert len(batch.frames) == 18  # the frame that passes 1 MiB ends the batch
    batch.release()
    ring.take(82)


def test_opening_again_gives_the_same_ring_newly_configured(make_ring):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    ring.fill()
    again = type(ring.source).open(ring.device, RingConfig(capacity_bytes=1 << 20, policy=Policy.DROP_NEWEST))
    assert again.capacity_bytes == 4096
    assert again.counters() == ring.counters


@pytest.mark.parametrize(
    "wrong", [{"capacity_bytes": 0}, {"sample_every": 0}, {"timeout_sec": -1}, {"timeout_sec": float("inf")}]
)
def test_an_impossible_configuration_is_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        RingConfig(**wrong)


def test_ring_only_flags_in_a_prefix_are_ignored(ring):
    prefix = bytearray(encode_prefix(3, Flags.ORDERED, ()))
    prefix[4:8] = (0xFFFFFFFF).to_bytes(4, "little")
    assert ring.library.hcb_ring_append(ring.handle, bytes(prefix), len(prefix)) == native.EMITTED
    assert ring.take(1)[0].header.flags == (
        Flags.ORDERED
        | Flags.END_OF_STREAM
        | Flags.CALL
        | Flags.CHECK
        | Flags.FOLDS
        | Flags.BATCHED
        | Flags.TRUNCATED
    )


def test_the_supervisor_hears_of_every_lasting_stall_and_can_be_woken(make_ring, stalls):
    ring = make_ring(policy=Policy.DROP_NEWEST)
    room = ring.fill()
    ring.source.configure(RingConfig(policy=Policy.BLOCK))
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ring.send)
            stalls(ring.device)
            ring.take(room + 1)
            assert waiting.result() == native.EMITTED
        for _ in range(room):
            ring.send()


def test_stamps_are_the_time_of_day(make_ring):
    ring = make_ring(capacity_bytes=1 << 20)
    # Long enough for the ticks of the processor to be measured, and for many looks at the clock.
    end = time.monotonic() + 0.3
    last = 0
    while time.monotonic() < end:
        before = time.time_ns()
        for _ in range(50):
            ring.send()
        after = time.time_ns()
        stamps = [frame.header.time_ns for frame in ring.take(50)]
        assert before - 20_000 <= min(stamps)
        assert max(stamps) <= after + 20_000
        assert [last - 20_000, *stamps] == sorted([last - 20_000, *stamps])
        last = stamps[-1]


def test_messages_are_not_left_out_once_the_last_of_several_threads_has_ended_that(ring, monkeypatch):
    source = ring.source
    source.leave_out(True)
    assert ring.send() == native.DROPPED

    class Library:
        # Another thread ends it while this one tells the ring its old state.

        def hcb_ring_configure(self, *arguments):
            monkeypatch.undo()
            source.leave_out(False)
            ring.library.hcb_ring_configure(*arguments)

    monkeypatch.setattr(source, "_library", Library())
    source.configure(RingConfig())
    assert ring.send() == native.EMITTED
