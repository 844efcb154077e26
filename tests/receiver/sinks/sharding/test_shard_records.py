"""The records of shard places: inconsistent records are refused; shards without their values."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, strategies as st
from shard_stories import CONSUMER, Array, Collector, Program, programs, scalar_program

from hostcallback.receiver.errors import IncompleteValueError
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding import sinks as shards
from hostcallback.receiver.sinks.sharding.shard_record import MAX_KNOWN, RecordReader
from hostcallback.receiver.sinks.sharding.sinks import (
    AssemblingSink,
    LocalShardSink,
    ProcessShardSink,
    shard_sink,
)

# Inconsistent records


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([], "came without arrays"),
        ([np.zeros(3, np.int64)], r"expected int64 of shape \(4,\)"),
        ([np.zeros((), np.int64)], r"dtype int64 and shape \(\)"),
        ([np.array([0, 1, 0, 0], np.int32)], "dtype int32"),
        ([np.array([0, 2, 0, 0, 1 << 40, 0]), np.zeros(4)], "2 shards of shape"),
        ([np.array([0, 1, 0, 0]), np.zeros(2)], r"shapes \[\(2,\)\], expected int64 of shape \(6,\)"),
        ([np.array([0, 1, 0, 0, 2, 0])], "different versions"),
        ([np.array([0, 0, 0, 0])], "at least one shard"),
        ([np.array([0, 1, 0, -1])], "partition -1"),
        ([np.array([0, 1, 0, 0, 2, -2]), np.zeros(2)], "nothing negative"),
        ([np.array([0, 1, 0, 0, -2, 2]), np.zeros(2)], "nothing negative"),
        ([np.array([-1, 2, 0, 0])], "occurrence -1"),
    ],
)
def test_damaged_records_are_refused(arrays: list[Array], text: str) -> None:
    sink = AssemblingSink(lambda message: pytest.fail("was handed on"))
    message = Message(CONSUMER, arrays, 0, 0, 0, "device 0", None)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            sink(message)
    assert sink.pending_values == 0
    if "occurrence" not in text and "2 shards of shape" not in text:  # alone these are as good as any
        with pytest.raises(ValueError, match=text):
            LocalShardSink(lambda message: pytest.fail("was handed on"))(message)


def test_shards_of_different_programs_are_not_put_together() -> None:
    one, other = scalar_program(2), Program((2,), 1, [(), (4,)], [[None], [0]])
    collector = Collector(one)
    sink = AssemblingSink(collector)
    sink(one.message(1, 0, 0))
    with pytest.raises(ValueError, match=r"\[\(\), \(4,\)\] came where others were of \[\(\), \(2,\)\]"):
        sink(other.message(1, 0, 1))
    assert (sink.pending_values, sink._assembly.unfinished) == (0, 0)
    stray = one.message(1, 1, 0)
    stray.arrays[0][3] = 7
    with pytest.raises(ValueError, match=r"partition 7 brought one of 2 shards, .* partitions \[0, 1\]"):
        sink(stray)
    for partition in one.partitions:
        sink(one.message(1, 2, partition))
    assert len(collector.messages) == 1


@given(st.lists(st.tuples(*[st.integers(-1, 3)] * 5), max_size=40))
def test_arbitrary_records_are_taken_or_refused(records: list[tuple[int, ...]]) -> None:
    sink = AssemblingSink(lambda message: None)
    for run_id, *record in records:
        message = Message(CONSUMER, [np.array(record)], 0, 0, run_id, f"device {record[3]}", None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "STANDSTILL_SEC", 0.0)
            with contextlib.suppress(ValueError, IncompleteValueError):
                sink(message)
        kept = sink._assembly
        assert 0 <= kept.pending_values <= kept.unfinished <= 40
        assert kept.pending_bytes == 0


# Shards by themselves


@given(programs(), st.data())
def test_shards_come_with_their_place_and_without_padding(program: Program, data: st.DataObject) -> None:
    got: list[Message] = []
    sink = LocalShardSink(got.append)
    partition = data.draw(st.sampled_from(program.partitions))
    message = program.message(3, 1, partition)
    sink(message)
    (delivered,) = got
    assert delivered._replace(arrays=[], shard_index=None) == message._replace(arrays=[])
    assert delivered.shard_index is not None
    whole = program.value((3, partition // program.shards, 1))
    for part, index, array in zip(delivered.arrays, delivered.shard_index, whole, strict=True):
        assert isinstance(part, np.ndarray)
        assert len(index) == array.ndim
        np.testing.assert_array_equal(array[index], part)
        assert all(0 <= s.start <= s.stop <= n for s, n in zip(index, array.shape, strict=True))


def test_records_of_equal_text_with_other_tiles_are_separate() -> None:
    reader = RecordReader()
    record = np.array([0, 2, 0, 0, 8, 0])
    for length in (4, 8, 4):
        message = Message(CONSUMER, [record, np.zeros(length)], 0, 0, 0, "device 0", None)
        assert reader.read(message).layout.places == ((slice(0, length),),)


def test_a_reader_does_not_remember_without_bound() -> None:
    reader = RecordReader()
    for size in range(3 * MAX_KNOWN):
        record = np.array([0, max(1, size), 0, 0, size, 0])
        assert reader.read(Message(CONSUMER, [record, np.zeros(1)], 0, 0, 0, "d", None)).layout.shapes == (
            (size,),
        )
    assert len(reader._known) <= MAX_KNOWN


@pytest.mark.parametrize(
    ("sharding", "assemble", "kind"),
    [
        ("global", True, AssemblingSink),
        ("global", False, ProcessShardSink),
        ("local", True, LocalShardSink),
        ("local", False, LocalShardSink),
    ],
)
def test_whole_values_take_all_shards_and_the_wish_for_them(
    sharding: str, assemble: bool, kind: type
) -> None:
    assert type(shard_sink(lambda message: None, sharding, assemble=assemble)) is kind
