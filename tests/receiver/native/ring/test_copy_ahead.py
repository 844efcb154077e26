"""Frames that are copied ahead of the reader: each once, in order, while producers emit and the reader delivers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.source import CopiedBatch
from hostcallback.receiver.taplog.format.layout import align
from hostcallback.receiver.wire.decoder import decode_frame
from hostcallback.receiver.wire.frame import HEADER, Flags, decode_header
from rings import TestRing

pytestmark = pytest.mark.native_only


def payloads(batch: Any) -> list[bytes]:
    """The payloads of a batch's frames, wherever these are."""
    return [
        decode_frame(memory, offset, external)[1][0].tobytes() for memory, offset, external in batch.frames
    ]


def number(i: int) -> bytes:
    return i.to_bytes(8, "little")


def test_unread_messages_are_copied_once_and_still_read(ring: TestRing) -> None:
    for i in range(3):
        ring.send(number(i))
    first = ring.source.read(10)
    assert payloads(first) == [number(i) for i in range(3)]
    assert ring.source.copy_ahead() is None
    for i in range(3, 8):
        ring.send(number(i))
    assert payloads(ring.source.copy_ahead()) == [number(i) for i in range(3, 8)]
    assert ring.source.copy_ahead() is None
    ring.send(number(8))
    assert payloads(ring.source.copy_ahead()) == [number(8)]
    first.release()
    assert payloads(ring.source.read(10)) == [number(i) for i in range(3, 9)]


def test_payloads_outside_the_ring_are_copied_whatever_their_size(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(capacity_bytes=1 << 16)
    sent = [bytes([i]) * size for i, size in enumerate((10, 3 << 20, 70_000, 5))]
    for payload in sent:
        ring.send(payload)
    copies: list[bytes] = []
    while (batch := ring.source.copy_ahead()) is not None:
        copies += payloads(batch)
    assert copies == sent
    read: list[bytes] = []
    while len(read) < len(sent):
        batch = ring.source.read(10)
        read += payloads(batch)
        batch.release()
    assert read == sent


def test_the_copies_of_a_batch_are_its_frames_with_all_payloads_inline(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(capacity_bytes=1 << 14)
    sizes = (10, 70_000, 500, 64, 5, 3 << 20, 900)
    for turn in range(8):  # further than the ring is long, so that frames lie at its end and at its beginning
        for i, size in enumerate(sizes):
            ring.send(bytes([turn * len(sizes) + i]) * size)
        batch = ring.source.read(10)
        assert (batch.count, batch.columns is None) == (len(sizes), False)
        asked: list[int] = []

        def room(nbytes: int, asked: list[int] = asked) -> Any:
            asked.append(nbytes)
            return np.full(nbytes, 0xEE, np.uint8)

        data, offsets = batch.columns.copied(batch.count, room)
        assert asked == [data.size]
        copies = CopiedBatch([(data.data, offset, None) for offset in offsets.tolist()])
        assert payloads(copies) == payloads(batch)
        ends = [*offsets[1:].tolist(), data.size]
        for (memory, offset, external), start, end in zip(batch.frames, offsets.tolist(), ends, strict=True):
            header, copy = decode_header(memory, offset), decode_header(data.data, start)
            assert copy == header._replace(flags=header.flags & ~Flags.EXTERNAL)
            assert (external is not None) == bool(header.flags & Flags.EXTERNAL)
            padding = data[start + HEADER.size + align(copy.meta_bytes) + copy.payload_bytes : end]
            assert (start % 64, end % 64, padding.any()) == (0, 0, False)
        batch.release()


def test_nothing_behind_the_end_of_a_stream_is_copied_before_the_reader_is_there(
    ring: TestRing,
) -> None:
    ring.send(number(0))
    ring.source.send_end(7)
    ring.send(number(1))
    assert payloads(ring.source.copy_ahead()) == [number(0)]
    assert ring.source.copy_ahead() is None
    ring.source.read(10).release()
    ring.source.read(10).release()  # the end
    assert payloads(ring.source.copy_ahead()) == [number(1)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy.BLOCK, Policy.OVERWRITE_OLDEST, Policy.DROP_NEWEST])
def test_copies_and_reads_of_a_busy_ring_agree(make_ring: Callable[..., Any], policy: Policy) -> None:
    ring = make_ring(policy=policy)
    count, producers = 3000, 3
    accepted, seen, read = [0] * producers, {}, {}
    lock, over = threading.Lock(), threading.Event()

    def emit(producer: int) -> None:
        for i in range(count):
            big = b"x" * 5000 if i % 40 == 0 else b""
            accepted[producer] += ring.send(number(producer) + number(i) + big) == native.EMITTED

    def copy() -> None:
        last = -1
        while not over.is_set():
            with lock:  # the reader delivers: it does not read on meanwhile
                batch = ring.source.copy_ahead()
            for memory, offset, _ in () if batch is None else batch.frames:
                header, (array,) = decode_frame(memory, offset)
                assert header.seq > last
                last = header.seq
                seen[header.seq] = array.tobytes()

    with ThreadPoolExecutor(producers + 1) as pool:
        copying = pool.submit(copy)
        emitting = [pool.submit(emit, producer) for producer in range(producers)]
        while not all(job.done() for job in emitting) or ring.counters.queued_messages:
            with lock:
                batch = ring.source.read(0.01)
                frames = (
                    []
                    if batch is None
                    else [
                        (decode_header(memory, offset).seq, payload)
                        for (memory, offset, _), payload in zip(batch.frames, payloads(batch), strict=True)
                    ]
                )
                if batch is not None:
                    batch.release()
            read.update(frames)
        over.set()
        copying.result()
        for job in emitting:
            job.result()
    assert len(read) == sum(accepted) - ring.counters.discarded
    assert all(seen[seq] == read[seq] for seq in seen.keys() & read.keys())
    if policy is not Policy.OVERWRITE_OLDEST:
        assert seen.keys() <= read.keys()
