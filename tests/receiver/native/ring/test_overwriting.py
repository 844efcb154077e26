"""The policy that drops the oldest: kept messages, messages that may not be dropped, and delivery counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.decoder import decode_frame
from hostcallback.receiver.wire.frame import Flags, decode_header
from rings import TestRing

pytestmark = pytest.mark.native_only

OVERWRITE = Policy.OVERWRITE_OLDEST


def numbers(received: list[Any]) -> list[int]:
    """The argument of `send`, as `number(i)`."""
    return [int.from_bytes(message.payload, "little") for message in received]


def number(i: int) -> bytes:
    """A payload that contains its number."""
    return i.to_bytes(8, "little")


def test_the_newest_are_kept_and_the_others_counted(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(policy=OVERWRITE)
    for i in range(1000):
        assert ring.send(number(i)) == native.EMITTED
    counters = ring.counters
    assert counters.emitted == 1000
    kept = counters.queued_messages
    assert counters.dropped == counters.discarded == 1000 - kept
    received = ring.take(kept)
    assert numbers(received) == list(range(1000 - kept, 1000))
    assert [message.header.seq for message in received] == list(range(1000 - kept, 1000))
    assert kept > 15


def test_frames_the_reader_holds_are_waited_for(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(policy=OVERWRITE)
    for i in range(5):
        ring.send(number(i))
    batch = ring.source.read(10)
    assert batch is not None
    assert batch.count == 5
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [ring.send(number(i)) for i in range(5, 1000)])
        while not ring.counters.waiting_producers:
            assert not sent.done()
        # Nothing has been written over.
        held = [decode_frame(memory, offset)[1][0] for memory, offset, _ in batch.frames]
        assert [int.from_bytes(array.tobytes(), "little") for array in held] == list(range(5))
        batch.release()
        assert sent.result() == [native.EMITTED] * 995
    rest = numbers(ring.take(ring.counters.queued_messages))
    assert rest[-1] == 999
    assert rest == list(range(1000 - len(rest), 1000))


def test_a_reader_that_delivers_does_not_keep_the_producers_waiting(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(policy=OVERWRITE)
    ring.send(number(0))
    batch = ring.source.read(10)
    assert batch is not None
    batch.release()  # the next lines run while the message is delivered
    for i in range(1, 1000):
        assert ring.send(number(i)) == native.EMITTED
    kept = ring.counters.queued_messages
    assert numbers(ring.take(kept)) == list(range(1000 - kept, 1000))


def test_the_end_of_a_stream_is_not_dropped(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(policy=OVERWRITE)
    ring.send(number(0))
    ring.source.send_end(77)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [ring.send(number(i)) for i in range(1, 100)])
        while not ring.counters.waiting_producers:
            assert not sent.done()
        received = ring.take(1)
        assert received[0].header.consumer_id == 77
        assert received[0].header.flags & Flags.END_OF_STREAM
        assert sent.result() == [native.EMITTED] * 99
    assert numbers(ring.take(ring.counters.queued_messages))[-1] == 99


def test_payloads_outside_the_ring_go_with_their_messages(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(policy=OVERWRITE, external_threshold_bytes=512, block_budget_bytes=10_000)
    for i in range(200):
        assert ring.send(number(i) + bytes(2000)) == native.EMITTED
    assert ring.counters.queued_bytes < 4096 + 10_000
    kept = ring.counters.queued_messages
    assert kept <= 5
    assert [int.from_bytes(m.payload[:8], "little") for m in ring.take(kept)] == list(range(200 - kept, 200))


@pytest.mark.parametrize("nbytes", [16, 300, 900])
def test_threads_that_overwrite_during_reading(make_ring: Callable[..., Any], nbytes: int) -> None:
    ring = make_ring(policy=OVERWRITE)
    threads, count = 4, 20_000
    last = [-1] * threads
    taken = 0
    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(ring.produce, threads, count, nbytes)
        for _ in itertools.count():
            if produced.done() and not ring.counters.queued_messages:
                break
            batch = ring.source.read(0.01)
            if batch is None:
                continue
            for memory, offset, _ in batch.frames:
                header = decode_header(memory, offset)
                payload = bytes(memory[offset + 64 : offset + 64 + nbytes])
                counter = int.from_bytes(payload[:8], "little")
                assert payload == number(counter) + bytes([counter & 255]) * (nbytes - 8)
                assert counter > last[header.consumer_id]
                last[header.consumer_id] = counter
            taken += batch.count
            batch.release()
        assert produced.result() == threads * count
    assert max(last) == count - 1
    assert taken + ring.counters.dropped == threads * count == ring.counters.emitted


def test_the_policy_can_be_changed_while_emissions_wait(ring: TestRing) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [ring.send(number(i)) for i in range(100)])
        while not ring.counters.waiting_producers:
            assert not sent.done()
        assert ring.counters.queued_messages < 30
        ring.source.configure(RingConfig(policy=OVERWRITE))  # no reader exists
        assert sent.result() == [native.EMITTED] * 100
    assert numbers(ring.take(ring.counters.queued_messages))[-1] == 99
