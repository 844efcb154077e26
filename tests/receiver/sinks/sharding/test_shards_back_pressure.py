"""Devices that are ahead wait for the others, in bounded memory, and give up values that never become whole."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st
from shard_stories import (
    Collector,
    Delivery,
    Gate,
    Program,
    identify,
    in_thread,
    messages_of,
    scalar_program,
    scan,
    stories,
    tell,
)

from hostcallback.receiver.sinks.sharding import assembly, sinks as shards
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from threads import wait_for


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few values."""
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 8)


def watch_most(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most that assemblies held at any time, from here on."""
    most = {"unfinished": 0, "pending_values": 0}
    add = assembly.Assembly.add

    def watched(self: Any, shard: Any) -> Any:
        try:
            return add(self, shard)
        finally:
            for name in most:
                most[name] = max(most[name], getattr(self, name))

    monkeypatch.setattr(assembly.Assembly, "add", watched)
    return most


@pytest.mark.usefixtures("small", "impatient_threads")
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_ahead_wait_and_nothing_is_lost(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = scalar_program(devices)
    launches = [(1, 400), *((run_id, 1) for run_id in range(2, 200)), (1000, 400)]
    story = tell(program, launches, random.Random(0), 0.0)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    most = watch_most(monkeypatch)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    assert set(identify(collector, story.whole)) == story.whole
    assert (delivery.discarded, sink.pending_values) == (0, 0)
    assert most["unfinished"] <= 8
    assert not sink._waiting


@pytest.mark.slow
@pytest.mark.usefixtures("small", "impatient_threads")
@pytest.mark.parametrize("devices", [2, 4])
def test_memory_is_bounded_also_when_much_is_lost(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.05)
    program = scalar_program(devices)
    story = tell(program, [(run_id, 100) for run_id in range(10)], random.Random(0), 0.2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    most = watch_most(monkeypatch)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    handed_on = identify(collector, story.whole)
    # With room for all of them this would be an equality.
    assert len(handed_on) + delivery.discarded + sink.pending_values <= len(story.whole) + len(story.broken)
    assert most["unfinished"] <= 4 * 8
    assert most["pending_values"] <= 2 * 8
    assert not sink._waiting


@pytest.mark.usefixtures("small")
def test_devices_that_run_launches_in_different_orders_go_on_for_each_other() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    one, other = scan(8, run_id=1), scan(8, run_id=2)
    first = in_thread(lambda: [sink(m) for m in messages_of(program, 0, [*one, *other])] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    for count, message in enumerate(messages_of(program, 1, other), 1):
        sink(message)
        wait_for(lambda count=count: len(collector.messages) == count)
    for message in messages_of(program, 1, one):
        sink(message)
    first.join()
    assert len(identify(collector, {(r, 0, o) for r, o in [*one, *other]})) == 16


@pytest.mark.usefixtures("small")
def test_a_device_ahead_goes_on_as_soon_as_the_others_have_caught_up() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    ahead = in_thread(lambda: [sink(m) for m in messages_of(program, 0, scan(100))] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    assert sink.pending_values == 8
    for message in messages_of(program, 1, scan(100)):
        sink(message)
    ahead.join()
    assert len(identify(collector, {(1, 0, o) for o in range(100)})) == 100


def test_the_bytes_of_pending_values_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_BYTES", 3 * 8 * 1000)
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.0)
    program = Program((2,), 1, [(1000,)], [[0]])
    sink = AssemblingSink(Collector(program))
    delivery = Delivery(sink)
    for message in messages_of(program, 0, scan(100)):
        delivery.bring(message)
        assert sink._assembly.pending_bytes == 8000 * sink.pending_values <= 3 * 8000
    assert delivery.discarded + sink.pending_values == 100
    # A value that exceeds the bound alone passes alone.
    monkeypatch.setattr(assembly, "MAX_PENDING_BYTES", 1)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for occurrence in range(3):
        for partition in program.partitions:
            sink(program.message(1, occurrence, partition))
    assert len(collector.messages) == 3


@pytest.mark.usefixtures("small")
def test_a_stalled_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.01)
    program = scalar_program(3)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    waits = []
    wait = sink._changed.wait
    monkeypatch.setattr(sink._changed, "wait", lambda timeout: waits.append(timeout) or wait(timeout))

    def go_on(first: int) -> None:
        for step in range(first, first + 100):
            for partition in (0, 1):
                delivery.bring(program.message(1, step, partition))
            assert sink._assembly.unfinished <= 8

    go_on(0)
    assert waits
    assert all(timeout <= 0.01 for timeout in waits)
    waited = len(waits)
    go_on(100)
    assert len(waits) == waited
    discarded = delivery.discarded
    assert discarded + sink.pending_values == 200
    # Its late shards were counted already; they complete the pending values, and from then on every value is complete.
    for step in range(200):
        delivery.bring(program.message(1, step, 2))
    assert delivery.discarded == discarded
    assert identify(collector, {(1, 0, o) for o in range(200)}) == [(1, 0, o) for o in range(discarded, 200)]
    for step in range(200, 300):
        for partition in program.partitions:
            delivery.bring(program.message(1, step, partition))
    assert (delivery.discarded, sink.pending_values) == (discarded, 0)
    assert len(collector.messages) == 300 - discarded
    # A device that is active again is waited for again.
    waits.clear()
    go_on(300)
    assert waits


@pytest.mark.usefixtures("small")
def test_nothing_is_given_up_while_a_tap_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.001)
    program = scalar_program(2)
    slow = Gate([], "slow")
    sink = AssemblingSink(slow)
    looks = 0
    wait = sink._changed.wait

    def counted(timeout: float) -> bool:
        nonlocal looks
        looks += 1
        return wait(timeout)

    monkeypatch.setattr(sink._changed, "wait", counted)
    sink(program.message(1, 0, 0))
    behind = in_thread(lambda: [sink(m) for m in messages_of(program, 1, scan(50))] and None)
    assert slow.entered.wait(60)
    ahead = in_thread(lambda: [sink(m) for m in messages_of(program, 0, scan(50)[1:])] and None)
    wait_for(lambda: looks > 20)  # many times as long as it would wait otherwise
    assert sink.pending_values == 8
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 60)  # a loaded machine may take its time
    slow.open.set()
    ahead.join()
    behind.join()
    assert sink._assembly.finished == 50
    assert sink._assembly.discarded == 0


@pytest.mark.usefixtures("small")
def test_nothing_is_given_up_while_other_receivers_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.001)
    program = scalar_program(2)
    looks = 0
    busy = threading.Event()

    def is_another_receiver_busy() -> bool:
        nonlocal looks
        looks += 1
        return not busy.is_set()

    collector = Collector(program)
    sink = AssemblingSink(collector, 0, is_another_receiver_busy)
    delivery = Delivery(sink)
    ahead = in_thread(lambda: [delivery.bring(m) for m in messages_of(program, 0, scan(50))] and None)
    wait_for(lambda: looks > 20)
    assert (sink.pending_values, delivery.discarded) == (8, 0)
    # From then on the other device has nothing more to deliver.
    busy.set()
    ahead.join()
    assert delivery.discarded + sink.pending_values == 50
    assert not shards.waiting_threads


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_tap_that_never_returns_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUSY_STANDSTILL_SEC", 0.01)
    program = scalar_program(2)
    slow = Gate([], "slow")
    sink = AssemblingSink(slow)
    sink(program.message(1, 0, 0))
    behind = in_thread(lambda: sink(program.message(1, 0, 1)))
    assert slow.entered.wait(60)
    delivery = Delivery(sink)
    for message in messages_of(program, 0, scan(50)[1:]):
        delivery.bring(message)
    assert delivery.discarded + sink.pending_values == 49
    slow.open.set()
    behind.join()


@given(stories(), st.integers(1, 6))
def test_without_time_to_wait_memory_is_bounded_and_no_value_is_repeated_or_wrong(
    told: Any, most: int
) -> None:
    story, rng = told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "MAX_PENDING_VALUES", most)
        patch.setattr(shards, "STANDSTILL_SEC", 0.0)
        collector = Collector(story.program)
        sink = AssemblingSink(collector)
        delivery = Delivery(sink)
        for message in story.interleaved(rng):
            delivery.bring(message)
            assert sink._assembly.unfinished <= 4 * most
            assert sink.pending_values <= 2 * most
        handed_on = identify(collector, story.whole)
        for launch in {key[:2] for key in handed_on}:
            occurrences = [key[2] for key in handed_on if key[:2] == launch]
            assert occurrences == sorted(occurrences)
        accounted = len(handed_on) + delivery.discarded + sink.pending_values
        assert accounted <= len(story.whole) + len(story.broken)


@pytest.mark.usefixtures("small")
def test_values_that_are_lost_already_are_noted_without_waiting_and_not_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = scalar_program(3)
    sink = AssemblingSink(lambda message: None)
    delivery = Delivery(sink)
    for occurrence in (0, 1000):
        delivery.bring(program.message(1, occurrence, 0))
    with monkeypatch.context() as patch:
        patch.setattr(sink._changed, "wait", lambda timeout: pytest.fail("waited"))
        for step in range(30):
            delivery.bring(program.message(1, step, 1))
    assert (delivery.discarded, sink.pending_values, sink._assembly.unfinished) == (29, 2, 31)
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.0)
    for step in range(30, 200):
        delivery.bring(program.message(1, step, 1))
        assert sink._assembly.unfinished <= 32
    assert delivery.discarded + sink.pending_values == 201
