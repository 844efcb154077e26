"""Failures of one check in a row: the first and the last of a batch are read, and those between are counted."""

from __future__ import annotations

from typing import Any

import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.frame import Flags, decode_header, encode_prefix
from rings import TestRing

pytestmark = pytest.mark.native_only

FOLDS = Flags.CHECK | Flags.FOLDS


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


def test_of_a_row_the_first_and_the_last_are_listed(ring: TestRing) -> None:
    for _ in range(10):
        append(ring, 7)
    assert read(ring) == ([(7, 0), (7, 9)], [0, 8])
    assert ring.counters.queued_messages == 0


def test_two_in_a_row_are_both_listed_and_nothing_is_folded(ring: TestRing) -> None:
    append(ring, 7)
    append(ring, 7)
    assert read(ring) == ([(7, 0), (7, 1)], [])


def test_other_messages_end_a_row(ring: TestRing) -> None:
    for consumer_id in (7, 7, 7, 8, 7, 7, 7, 7):
        append(ring, consumer_id)
    append(ring, 9, Flags.ORDERED)
    append(ring, 7)
    frames, folded = read(ring)
    assert frames == [(7, 0), (7, 2), (8, 3), (7, 4), (7, 7), (9, 8), (7, 9)]
    assert folded == [0, 1, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("flags", [Flags.CHECK, Flags.ORDERED])
def test_messages_that_do_not_ask_for_it_are_never_folded(ring: TestRing, flags: Flags) -> None:
    for _ in range(5):
        append(ring, 7, flags)
    frames, folded = read(ring)
    assert len(frames) == 5
    assert folded == []


def test_a_batch_released_in_parts_counts_folded_failures(ring: TestRing) -> None:
    for consumer_id in (7, 7, 7, 7, 8):
        append(ring, consumer_id)
    batch = ring.source.read(30)
    batch.release(1)
    assert ring.counters.queued_messages == 4
    batch.release(2)
    assert ring.counters.queued_messages == 1
    batch.release()
    assert ring.counters.queued_messages == 0


def test_the_ring_goes_round_while_frames_are_folded(ring: TestRing) -> None:
    seen = count = 0
    for _ in range(50):
        for _ in range(20):
            append(ring, 7)
            count += 1
        while ring.counters.queued_messages:
            frames, folded = read(ring)
            seen += len(frames) + sum(folded)
    assert seen == count
