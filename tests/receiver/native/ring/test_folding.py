"""Failures of one check in a row: the first 64 and the last of a batch are read, and those between are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.frame import Flags, decode_header, encode_prefix
from rings import TestRing

pytestmark = pytest.mark.native_only

FOLDS = Flags.CHECK | Flags.FOLDS
LISTED = 64
"""Failures of a row that are read before those that are only counted."""


@pytest.fixture
def ring(make_ring: Callable[..., TestRing]) -> TestRing:
    """A ring of 32 KiB, which takes some more failures than are listed."""
    return make_ring(capacity_bytes=1 << 15)


def append(ring: Any, consumer_id: int, flags: Flags = FOLDS) -> None:
    prefix = encode_prefix(consumer_id, flags, ())
    assert ring.library.hcb_ring_append(ring.handle, prefix, len(prefix)) == native.EMITTED


def read(ring: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """(consumer id, sequence number) of each frame of one batch, and how many were folded before it."""
    batch = ring.source.read(30)
    headers = [decode_header(memory, offset) for memory, offset, _ in batch.frames]
    folded = list(batch.folded)
    batch.release()
    return [(header.consumer_id, header.seq) for header in headers], folded


def test_of_a_row_the_first_ones_and_the_last_are_listed(ring: TestRing) -> None:
    for _ in range(LISTED + 10):
        append(ring, 7)
    listed = [*range(LISTED), LISTED + 9]
    assert read(ring) == ([(7, seq) for seq in listed], [0] * LISTED + [9])
    assert ring.counters.queued_messages == 0


def test_a_reader_may_list_more(ring: TestRing) -> None:
    for count, listed in ((100, 100), (2, 2), (0, LISTED)):
        ring.source.list_failures(count)
        for _ in range(listed + 10):
            append(ring, 7)
        frames, folded = read(ring)
        assert (len(frames), folded) == (listed + 1, [*[0] * listed, 9])


def test_a_row_of_as_many_as_are_listed_has_nothing_folded(ring: TestRing) -> None:
    for _ in range(LISTED + 1):
        append(ring, 7)
    assert read(ring) == ([(7, seq) for seq in range(LISTED + 1)], [])


def test_other_messages_end_a_row(ring: TestRing) -> None:
    long = LISTED + 3
    for consumer_id in (*[7] * long, 8, *[7] * (long + 1)):
        append(ring, consumer_id)
    append(ring, 9, Flags.ORDERED)
    append(ring, 7)
    frames, folded = read(ring)
    first, second = [*range(LISTED), long - 1], [*range(long + 1, long + 1 + LISTED), 2 * long + 1]
    assert frames == [
        *((7, seq) for seq in first), (8, long), *((7, seq) for seq in second), (9, 2 * long + 2), (7, 2 * long + 3),
    ]  # fmt: skip
    assert folded == [*[0] * LISTED, 2, 0, *[0] * LISTED, 3, 0, 0]


@pytest.mark.parametrize("flags", [Flags.CHECK, Flags.ORDERED])
def test_messages_that_do_not_ask_for_it_are_never_folded(ring: TestRing, flags: Flags) -> None:
    for _ in range(LISTED + 5):
        append(ring, 7, flags)
    frames, folded = read(ring)
    assert len(frames) == LISTED + 5
    assert folded == []


def test_a_batch_released_in_parts_counts_folded_failures(ring: TestRing) -> None:
    for consumer_id in (*[7] * (LISTED + 3), 8):
        append(ring, consumer_id)
    batch = ring.source.read(30)
    batch.release(1)
    assert ring.counters.queued_messages == LISTED + 3
    batch.release(LISTED + 1)
    assert ring.counters.queued_messages == 1
    batch.release()
    assert ring.counters.queued_messages == 0


def test_the_ring_goes_round_while_frames_are_folded(ring: TestRing) -> None:
    seen = count = 0
    for _ in range(50):
        for _ in range(LISTED + 20):
            append(ring, 7)
            count += 1
        while ring.counters.queued_messages:
            frames, folded = read(ring)
            seen += len(frames) + sum(folded)
    assert seen == count
