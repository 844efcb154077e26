"""Decoding many messages at a time gives the same results as decoding one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hostcallback.receiver.errors import WireError
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring_batch import MIN_BATCH, BatchDecoder, DecodedBatch
from hostcallback.receiver.wire.array_types import ArraySpec, pack_subbyte
from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import Flags, encode_prefix

pytestmark = pytest.mark.native_only

KINDS: list[list[tuple[Any, tuple[int, ...]]]] = [
    [(np.float32, ())],
    [(np.bool_, ())],
    [(np.complex128, ())],
    [(ml_dtypes.bfloat16, (3,))],
    [(np.int16, (2, 3))],
    [(np.float32, (0,))],
    [(np.int8, (1024,))],
    [(np.int8, (1025,))],
    [(ml_dtypes.int4, (5,))],
    [(np.float32, ()), (np.int8, (3,)), (np.float64, (8, 2))],
    [(np.float32, (1,) * 40)],
    [(np.float32, ())] * 8,
    [],
]


def send(ring: Any, consumer_id: int, arrays: Sequence[Any], flags: Flags = Flags.ORDERED) -> None:
    prefix = encode_prefix(consumer_id, flags, [ArraySpec.of(a.dtype, a.shape) for a in arrays])
    raw = [pack_subbyte(a) if a.dtype == ml_dtypes.int4 else np.ascontiguousarray(a) for a in arrays]
    addresses = (ctypes.c_void_p * len(raw))(*[a.ctypes.data for a in raw])
    sizes = (ctypes.c_uint64 * len(raw))(*[a.nbytes for a in raw])
    sent = ring.library.hcb_ring_send(
        ring.handle, prefix, len(prefix), len(raw), addresses, sizes, consumer_id * 3
    )
    assert sent == native.EMITTED


def make(kind: int, number: int) -> list[Any]:
    arrays = []
    for dtype, shape in KINDS[kind]:
        size = int(np.prod(shape, dtype=int))
        arrays.append(((np.arange(size) + number) % 7).astype(dtype).reshape(shape))
    return arrays


def same(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other))


def read(ring: Any) -> tuple[DecodedBatch, list[Any]]:
    """One batch, decoded in both ways, after its memory has been released and overwritten."""
    batch = ring.source.read(30)
    one_by_one = [Decoder().decode(*frame) for frame in batch.frames]
    found = BatchDecoder(lambda error: pytest.fail(str(error))).decode(batch)
    for _, offset, _ in batch.frames:
        ring.corrupt(offset + 64, b"\xff" * 128)
    batch.release()
    return found._replace(items=list(found.items)), one_by_one


def assert_delivers(found: DecodedBatch, one_by_one: list[Any]) -> None:
    assert found.nbytes == sum(a.nbytes for *_, arrays in one_by_one for a in arrays)
    assert found.last_seq == one_by_one[-1][2]
    stacks: dict[Any, list[Any]] = {}
    for item in one_by_one:
        stacks.setdefault((item[0], item[1], *[(a.shape, a.dtype) for a in item[-1]]), []).append(item)
    expected = [item for item in one_by_one if not item[1] & Flags.BATCHED]
    expected += [items[-1] for items in stacks.values() if items[0][1] & Flags.BATCHED]
    expected.sort(key=lambda item: item[2])
    assert [item[:5] for item in found.items] == [item[:5] for item in expected]
    for item, (*_, arrays) in zip(found.items, expected, strict=True):
        *_, stacked, got = item
        if item[1] & Flags.BATCHED:
            alike = stacks[(item[0], item[1], *[(a.shape, a.dtype) for a in arrays])]
            assert stacked == len(alike)
            arrays = [np.stack([a[-1][i] for a in alike]) for i in range(len(arrays))]
        else:
            assert stacked == 0
        assert len(got) == len(arrays)
        assert all(same(a, b) for a, b in zip(got, arrays, strict=True))
        assert all(isinstance(a, np.ndarray) and a.flags.writeable and a.flags.aligned for a in got)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("flags", [Flags.ORDERED, Flags.BATCHED], ids=["single", "batched"])
@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_messages_of_each_kind(make_ring: Any, kind: int, flags: Flags, count: int) -> None:
    ring = make_ring(capacity_bytes=1 << 20)
    for number in range(count):
        send(ring, 5, make(kind, number), flags)
    assert_delivers(*read(ring))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, len(KINDS) - 1), st.sampled_from([3, 4]), st.booleans(), st.integers(1, 9)),
        min_size=1,
        max_size=20,
    )
)
def test_any_sequence_of_messages(make_ring: Any, runs: list[tuple[int, int, bool, int]]) -> None:
    ring = make_ring(capacity_bytes=1 << 20)
    for kind, consumer_id, batched, count in runs:
        for number in range(count):
            send(ring, consumer_id, make(kind, number), Flags.BATCHED if batched else Flags.ORDERED)
    assert_delivers(*read(ring))


def test_more_kinds_than_there_are_groups(make_ring: Any) -> None:
    ring = make_ring(capacity_bytes=4 << 20)
    for _ in range(5):
        for size in range(200):
            send(ring, 1, [np.arange(size, dtype=np.int8)])
    found, one_by_one = read(ring)
    assert len(found.items) == 1000
    assert_delivers(found, one_by_one)


def test_arrays_of_alike_messages_do_not_overlap(make_ring: Any) -> None:
    ring = make_ring(capacity_bytes=1 << 20)
    for number in range(50):
        send(ring, 1, make(9, number))
    found, _ = read(ring)
    for index, item in enumerate(found.items):
        for array in item[-1]:
            array[...] = index
    for index, item in enumerate(found.items):
        assert all((array == np.array(index).astype(array.dtype)).all() for array in item[-1])


def test_one_kept_array_keeps_little_memory(make_ring: Any) -> None:
    ring = make_ring(capacity_bytes=4 << 20)
    for number in range(1000):
        send(ring, 1, make(6, number))
    found, _ = read(ring)
    base = found.items[500][-1][0]
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert 1024 <= base.nbytes <= 64 << 10


@pytest.mark.parametrize("count", [40, MIN_BATCH - 1])
def test_a_damaged_message_among_others_is_lost_alone(make_ring: Any, count: int) -> None:
    ring = make_ring(capacity_bytes=1 << 20)
    for number in range(count):
        send(ring, 1, make(0, number))
    batch = ring.source.read(30)
    first, second = count // 5, count // 2
    ring.corrupt(batch.frames[first][1] + 64, b"\xc1")  # no msgpack
    ring.corrupt(batch.frames[second][1] + 48, (3).to_bytes(8, "little"))  # payload_bytes
    errors: list[WireError] = []
    found = BatchDecoder(errors.append).decode(batch)
    found = found._replace(items=list(found.items))
    batch.release()
    assert len(errors) == 2
    assert [item[2] for item in found.items] == [n for n in range(count) if n not in (first, second)]
    assert all(same(item[-1][0], make(0, item[2])[0]) for item in found.items)
