"""Shards of the same value are assembled: once, whole, in order; a missing shard is counted once."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from shard_stories import (
    CONSUMER,
    Collector,
    Delivery,
    Key,
    identify,
    messages_of,
    scalar_program,
    scan,
    stories,
    tell,
)

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding import assembly, launches
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink


def key_of(message: Message) -> Key:
    """The value's number in a message."""
    record = message.arrays[0]
    return message.run_id, int(record[2]), int(record[0])


@given(stories())
def test_values_come_once_whole_and_in_order_and_the_others_are_counted_once(told: Any) -> None:
    story, rng = told
    collector = Collector(story.program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    completed = []
    missing = dict.fromkeys(story.whole, story.program.shards)
    for message in story.interleaved(rng):
        delivery.bring(message)
        key = key_of(message)
        if key in missing:
            missing[key] -= 1
            if not missing[key]:
                completed.append(key)
        assert len(collector.messages) == len(completed)  # no later than with its last shard
    assert identify(collector, story.whole) == completed
    assert delivery.discarded + sink.pending_values == len(story.broken)
    for message in collector.messages:
        for array in message.arrays:
            assert array.flags.writeable
        assert message.shard_index is None


@pytest.mark.slow
@given(stories())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_when_every_device_has_its_thread(impatient_threads: None, told: Any) -> None:
    story, _ = told
    collector = Collector(story.program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    handed_on = identify(collector, story.whole)
    assert set(handed_on) == story.whole
    for launch in {key[:2] for key in handed_on}:
        occurrences = [key[2] for key in handed_on if key[:2] == launch]
        assert occurrences == sorted(occurrences)
    assert delivery.discarded + sink.pending_values == len(story.broken)


@pytest.mark.slow
@given(stories(max_values=4), st.integers(1, 4))
@settings(max_examples=50)
def test_later_launches_leave_nothing_behind(told: Any, overtaken_by: int) -> None:
    story, rng = told
    program = story.program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "OVERTAKEN_BY", overtaken_by)
        patch.setattr(assembly, "OVERTAKEN_NS", 5)
        collector = Collector(program)
        sink = AssemblingSink(collector)
        delivery = Delivery(sink)
        later = tell(program, [(run_id, 1) for run_id in range(100, 120)], rng, 0.0)
        in_step = tell(program, [(run_id, 1) for run_id in range(200, 300)], rng, 0.0)
        order = [
            *story.interleaved(rng),
            *later.interleaved(rng),
            *itertools.chain(*zip(*in_step.streams.values(), strict=True)),
        ]
        for time, message in enumerate(order):
            delivery.bring(message._replace(time_ns=time))
        assert delivery.discarded == len(story.broken)
        whole = story.whole | later.whole | in_step.whole
        assert set(identify(collector, whole)) == whole
        kept = sink._assembly
        assert (kept.pending_values, kept.pending_bytes, kept.unfinished) == (0, 0, 0)
        assert len(kept) < 60 * program.groups


@pytest.mark.parametrize(
    "values", [scan(300), [(run_id, 0) for run_id in range(300)]], ids=["scan", "launches"]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_device_may_be_hundreds_of_values_ahead(devices: int, values: list[tuple[int, int]]) -> None:
    program = scalar_program(devices)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for partition in reversed(program.partitions):
        for message in messages_of(program, partition, values):
            sink(message)
    assert identify(collector, {(run_id, 0, o) for run_id, o in values}) == [
        (run_id, 0, o) for run_id, o in values
    ]
    assert sink.pending_values == 0


def test_nothing_is_lost_when_devices_run_launches_in_different_orders() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    one, other = scan(50, run_id=1), scan(50, run_id=2)
    for message in messages_of(program, 0, [*one, *other]) + messages_of(program, 1, [*other, *one]):
        sink(message)
    assert len(identify(collector, {(r, 0, o) for r, o in [*one, *other]})) == 100


@pytest.mark.parametrize(("device_index", "expected"), [(0, 1), (1, 1), (2, 2), (7, 1)])
def test_the_whole_array_has_one_device(device_index: int, expected: int) -> None:
    # As in the second group of a partially manual program, whose first partition is not 0.
    got: list[Message] = []
    sink = AssemblingSink(got.append, device_index)
    for partition in (3, 2, 1):
        record = np.array(shard_record([], shards=3, group=0, partition=partition), np.int64)
        sink(Message(CONSUMER, [record], 10 * partition, 20 * partition, 5, f"device {partition}", None))
    assert got == [Message(CONSUMER, [], 10 * expected, 20 * expected, 5, f"device {expected}", None)]


def test_a_sink_may_keep_and_change_its_arguments() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for message in messages_of(program, 0, scan(3)) + messages_of(program, 1, scan(3)):
        sink(message)
    for message in collector.messages:
        for array in message.arrays:
            array[...] = 7
    arrays = [array for message in collector.messages for array in message.arrays]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)


@pytest.mark.slow
def test_values_that_were_handed_on_are_not_kept_however_long_the_launch() -> None:
    others = [o for o in gc.get_objects() if type(o) is launches.Value]  # of other tests
    program = scalar_program(2)
    sink = AssemblingSink(lambda message: None)
    ahead, behind = messages_of(program, 0, scan(500)), messages_of(program, 1, scan(500))
    sink(ahead[0])
    for message, other in zip(ahead[1:], behind[:-1], strict=True):  # device 1 is always one behind
        sink(message)
        sink(other)
    gc.collect()
    known = {id(o) for o in others}
    kept = [
        o for o in gc.get_objects() if type(o) is launches.Value and o.occurrence >= 0 and id(o) not in known
    ]
    assert len(kept) < 6
    assert sink.pending_values == 1


@pytest.mark.slow
def test_a_long_backlog_is_freed_without_exhausting_the_stack() -> None:
    program = scalar_program(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "MAX_PENDING_VALUES", 10**6)
        sink = AssemblingSink(lambda message: None)
        message = program.message(1, 0, 0)
        for occurrence in range(100_000):
            record = message.arrays[0].copy()
            record[0] = occurrence
            sink(message._replace(arrays=[record, *message.arrays[1:]]))
        assert sink.pending_values == 100_000
    del sink
