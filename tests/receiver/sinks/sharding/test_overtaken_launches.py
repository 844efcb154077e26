"""Launches that end with values of which shards were lost; run ids that come back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from shard_stories import Collector, Delivery, in_thread, messages_of, scalar_program, scan

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding import assembly
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from threads import wait_for


def test_values_that_later_launches_have_overtaken_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "OVERTAKEN_NS", 1000)
    program = scalar_program(2)
    sink = AssemblingSink(lambda message: None)
    delivery = Delivery(sink)
    delivery.bring(program.message(0, 0, 0, time_ns=0))

    def launch(first: int, count: int, time_ns: int, partitions: Iterable[int]) -> int:
        for run_id in range(first, first + count):
            for partition in partitions:
                delivery.bring(program.message(run_id, 0, partition, time_ns=time_ns))
        return delivery.discarded

    # By launches that not all devices have begun it is not overtaken, however old it is.
    assert launch(1, 300, 5000, (0,)) == 0
    assert launch(1, 300, 5000, (1,)) == 0
    assert sink.pending_values == 1
    # The next time that launches are counted it is.
    assert launch(301, 300, 5000, (0, 1)) == 1
    assert sink.pending_values == 0
    # One that is not old may belong to a launch that is slow on one device.
    delivery.bring(program.message(1000, 0, 0, time_ns=5000))
    assert launch(1001, 1000, 6000, (0, 1)) == 1
    delivery.bring(program.message(1000, 0, 1, time_ns=6001))
    assert (delivery.discarded, sink.pending_values, sink._assembly.finished) == (1, 0, 1601)
    # Few later launches do not overtake: XLA may run several at once.
    delivery.bring(program.message(3000, 0, 0, time_ns=6001))
    assert launch(3001, 3, 10000, (0, 1)) == 1
    delivery.bring(program.message(3000, 0, 1, time_ns=10000))
    assert (delivery.discarded, sink.pending_values) == (1, 0)


def test_launches_on_other_devices_overtake_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "OVERTAKEN_NS", 0)
    collector = Collector(scalar_program(2))
    sink = AssemblingSink(collector)
    sink(collector.program.message(0, 0, 0))
    for run_id in range(1, 100):
        for partition in (0, 1):
            message = collector.program.message(run_id, 0, partition, time_ns=10)
            sink(message._replace(device=f"device {partition + 2}"))
    sink(collector.program.message(0, 0, 1))
    assert len(collector.messages) == 100


def test_full_of_overtaken_values_no_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 16)
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    monkeypatch.setattr(sink._changed, "wait", lambda timeout: pytest.fail("waited"))
    delivery = Delivery(sink)
    for run_id in range(200):
        for partition in (0, 1) if run_id % 2 else (0,):
            delivery.bring(program.message(run_id, 0, partition))
    assert len(collector.messages) == 100
    assert delivery.discarded + sink.pending_values == 100
    assert delivery.discarded > 80


@pytest.mark.parametrize("restart", [False, True], ids=["counted on", "counted from zero"])
def test_run_ids_come_back(restart: bool) -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    keys = []
    for time in range(3):
        values = [(run_id, o if restart else o + 3 * time) for run_id in (5, 6) for o in range(3)]
        keys += [(run_id, 0, o) for run_id, o in values]
        for partition in program.partitions:
            for message in messages_of(program, partition, values):
                sink(message)
    for message, key in zip(collector.messages, keys, strict=True):
        np.testing.assert_array_equal(message.arrays[1], program.value(key)[1])


def test_a_launch_with_a_repeated_id_waits_for_devices_still_in_the_earlier_one() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)

    def stream(partition: int) -> list[Message]:
        again = [m._replace(arrays=[m.arrays[0], *(a + 0.5 for a in m.arrays[1:])])
                 for m in messages_of(program, partition, scan(3))]  # fmt: skip
        return [*messages_of(program, partition, scan(3)), *again]

    ahead = in_thread(lambda: [sink(message) for message in stream(0)] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    for message in stream(1):
        sink(message)
    ahead.join()
    got = [message.arrays[1].tolist() for message in collector.messages]
    values = [program.value((1, 0, o))[1] for o in range(3)]
    assert got == [*(v.tolist() for v in values), *((v + 0.5).tolist() for v in values)]
