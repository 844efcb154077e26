"""Payloads outside the ring: budget, ownership, and reuse of memory."""

from __future__ import annotations

import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.taplog.flight.recorder import RingFileError, read_ring
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import encode_prefix

pytestmark = pytest.mark.native_only

MIB = 1 << 20


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture
def ring(make_ring):
    return make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=4 * MIB)


def test_a_large_payload_reaches_numpy_in_a_separate_block(ring):
    ring.send(bytes(range(256)) * 32)  # at the threshold
    ring.send(bytes(range(256)) * 32 + b"!")
    small, large = ring.take(2)
    assert small.external is None
    assert large.external.tobytes() == bytes(range(256)) * 32 + b"!"
    assert large.header.payload_bytes == 8193
    assert address_of(large.external) % 64 == 0
    assert large.external.flags.writeable


def test_the_block_lives_as_long_as_an_array_of_it(ring):
    ring.send(b"a" * 100_000)
    view = ring.take(1)[0].external[10:20].view(np.int16)
    gc.collect()
    for _ in range(10):
        ring.send(b"b" * 100_000)
        ring.take(1)
    assert view.tobytes() == b"a" * 10


def test_a_block_is_used_again_once_its_arrays_are_gone(ring):
    addresses = set()
    for i in range(50):
        ring.send(bytes([i]) * 100_000)
        array = ring.take(1)[0].external
        assert array[0] == array[-1] == i
        addresses.add(address_of(array))
        del array
    assert len(addresses) <= 3


@pytest.mark.parametrize(("nbytes", "count"), [(256 << 10, 16), (1 * MIB, 4), (8 * MIB, 1), (9000, 64)])
def test_a_batch_holds_four_mib_of_blocks_and_64_of_them(make_ring, nbytes, count):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    for _ in range(count + 1):
        ring.send(bytes(nbytes))
    batch = ring.source.read(1)
    assert batch.count == count
    assert [payload.nbytes for _, _, payload in batch.frames] == [nbytes] * count
    batch.release()
    assert ring.take(1)


def test_a_batch_holds_one_mib_of_payloads_in_the_ring(make_ring):
    ring = make_ring(capacity_bytes=4 * MIB, external_threshold_bytes=MIB)
    for _ in range(20):
        ring.send(bytes(128 << 10))
    batch = ring.source.read(1)
    assert batch.count == 8
    batch.release()
    assert len(ring.take(12)) == 12


def read_sizes(ring, send) -> tuple[list[int], int]:
    """The number of messages of each batch that a reader gets while `send` sends, and how often the reader slept."""

    def read() -> tuple[list[int], int]:
        sizes, before = [], resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        while (batch := ring.source.read(None)) is not None:
            sizes.append(batch.count)
            batch.release()
        return sizes, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        send()
        ring.source.wake()
        return reader.result()


def test_a_stream_of_blocks_does_not_wake_the_reader_for_each(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    pause = threading.Event()

    def send() -> None:
        for _ in range(100):
            ring.send(bytes(100_000))
            pause.wait(0.0003)

    for _ in range(10):  # on a busy machine a pause may be longer than the reader rests
        sizes, sleeps = read_sizes(ring, send)
        if sleeps < 50:
            break
    assert sleeps < 50
    assert len(sizes) < 50
    assert sum(sizes) == 100


def test_many_bytes_of_blocks_end_the_rest_of_the_reader(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    for _ in range(10):  # on a busy machine the reader may wake up late
        sizes, _ = read_sizes(ring, lambda: ring.produce(1, 300, 100_000))
        if sorted(sizes)[len(sizes) // 2] < 30:
            break
    assert sorted(sizes)[len(sizes) // 2] < 30
    assert sum(sizes) == 300


def burst(ring, payload: bytes, count: int) -> None:
    for _ in range(count):
        ring.send(payload)
    while ring.counters.queued_messages:  # not `take`, which copies
        ring.source.read(0).release()  # at once: in a stream the reader rests while little waits


def test_blocks_of_a_burst_are_still_there_at_the_next_one(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    payload = bytes(MIB // 4)  # 64 pages
    burst(ring, payload, 40)
    burst(ring, payload, 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        for _ in range(300):
            burst(ring, payload, 1)
        burst(ring, payload, 40)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * 64


def test_blocks_of_several_sizes_are_used_again(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    payloads = [bytes(MIB), bytes(MIB // 16), bytes(MIB // 4)]
    for _ in range(3):
        for payload in payloads:
            burst(ring, payload, 1)
            burst(ring, payload, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        for payload in payloads:
            burst(ring, payload, 1)
            burst(ring, payload, 4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * 64


def test_a_block_that_is_not_kept_takes_no_place_of_others(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=4 * MIB)
    small, large = bytes(MIB // 4), bytes(3 * MIB)  # more than the half of the budget that is kept
    burst(ring, small, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        burst(ring, large, 1)
    large_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    for _ in range(20):
        burst(ring, large, 1)
        burst(ring, small, 1)
        burst(ring, small, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2 * large_faults + 5 * 64


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_blocks_that_are_not_needed_any_more_are_freed_in_time(make_ring):
    ring = make_ring(capacity_bytes=64 << 10, external_threshold_bytes=8192, block_budget_bytes=64 * MIB)
    payload = bytes(MIB // 4)
    burst(ring, payload, 80)
    before = resident_bytes()
    for _ in range(3 * 4096):  # after each 4,096, half of those that were not needed since are freed
        burst(ring, payload, 1)
    assert 12 * MIB < before - resident_bytes() < 20 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_freed(ring):
    payload = bytes(3 * MIB)

    def cycle(count):
        for _ in range(count):
            ring.send(payload)
            batch = ring.source.read(1)
            assert batch.frames[0][2].nbytes == len(payload)
            batch.release()

    cycle(5)
    before = resident_bytes()
    cycle(100)
    assert resident_bytes() - before < 16 * MIB


def test_the_budget_bounds_unread_payloads(ring, stalls):
    for i in range(4):
        assert ring.send(bytes([i]) * MIB) == native.EMITTED
    assert ring.counters.queued_bytes > 4 * MIB
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, b"waited" * MIB)
        stalls(ring.device)
        received = ring.take(5)
        assert waiting.result() == native.EMITTED
    assert [r.external[0] for r in received] == [0, 1, 2, 3, ord("w")]
    assert ring.counters.queued_bytes == 0


def test_the_budget_is_given_back_when_the_reader_takes_a_block(ring):
    ring.source.configure(RingConfig(block_budget_bytes=4 * MIB, policy=Policy.DROP_NEWEST))
    kept = []
    for i in range(20):  # five times the budget, all alive in arrays
        assert ring.send(bytes([i]) * MIB) == native.EMITTED
        kept.append(ring.take(1)[0].external)
    assert [int(array[5]) for array in kept] == list(range(20))


def test_a_payload_beyond_the_budget_is_let_through_alone(ring):
    ring.source.configure(RingConfig(block_budget_bytes=4 * MIB, policy=Policy.DROP_NEWEST))
    assert ring.send(bytes(6 * MIB)) == native.EMITTED
    assert ring.send(bytes(6 * MIB)) == native.DROPPED
    assert ring.send(bytes(MIB)) == native.DROPPED
    assert ring.send(b"small") == native.EMITTED
    assert ring.take(2)[0].external.nbytes == 6 * MIB
    assert ring.send(bytes(6 * MIB)) == native.EMITTED
    ring.take(1)


def test_a_larger_budget_lets_waiting_producers_go_on(ring, stalls):
    for _ in range(4):
        ring.send(bytes(MIB))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.send, bytes(MIB))
        stalls(ring.device)
        ring.source.configure(RingConfig(block_budget_bytes=5 * MIB))
        assert waiting.result(30) == native.EMITTED
    ring.take(5)


def test_many_producers_of_blocks_lose_nothing(make_ring):
    ring = make_ring(external_threshold_bytes=1024, block_budget_bytes=64 << 10)
    threads, count, nbytes = 4, 200, 5000
    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(ring.produce, threads, count, nbytes)
        received = ring.take(threads * count)
    assert produced.result() == threads * count
    for thread in range(threads):
        own = [r for r in received if r.header.consumer_id == thread]
        for i, r in enumerate(own):
            assert r.payload == i.to_bytes(8, "little") + bytes([i & 255]) * (nbytes - 8)


def test_no_payload_is_too_large_for_a_tiny_ring(ring):
    ring.send(b"x" * (32 * MIB))
    assert ring.take(1)[0].external.nbytes == 32 * MIB


def test_long_metadata_travels_in_the_ring_even_without_a_payload(ring):
    specs = [ArraySpec(6, (0,))] * 300
    prefix = encode_prefix(9, 0, specs)
    assert 1024 < len(prefix) < 2048  # beyond a quarter of the ring
    for _ in range(10):
        assert ring.library.hcb_ring_append(ring.handle, prefix, len(prefix)) >= 0
        batch = ring.source.read(1)
        consumer_id, *_, arrays = Decoder().decode(*batch.frames[0])
        assert (consumer_id, len(arrays)) == (9, 300)
        batch.release()


def test_a_ring_in_a_file_says_where_its_blocks_end(ring, tmp_path):
    path = tmp_path / "cpu_0.hcbring"
    assert ring.library.hcb_ring_keep_in_file(ring.handle, bytes(path), b"cpu:0", MIB) == 0
    ring.send(bytes(9000))
    whole = path.read_bytes()
    (found,) = read_ring(path).frames
    assert found.header.payload_bytes == 9000
    cut = tmp_path / "cut.hcbring"
    cut.write_bytes(whole[:-4096])
    with pytest.raises(RingFileError, match="it was truncated"):
        read_ring(cut)
