"""The native rules of taps, through the handler of a GPU, which can be called one message at a time."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compiling import needs_compiler
from fake_gpu import Driver, Gpu
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.truncation import TruncatedArray, split_truncated
from threads import in_threads

pytestmark = [pytest.mark.native_only, needs_compiler]

_consumers = itertools.count(7_000_000)
SECOND = 1_000_000_000


class Tap:
    """One consumer with rules, whose messages count upwards."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.consumer_id = next(_consumers)
        self.sent = 0

    def rule(self, **rules: Any) -> None:
        assert native.load().hcb_control_set(self.consumer_id, native.Control(**rules)) == native.EMITTED

    def gate(self, *, closed: bool, device: int = 9) -> None:
        native.load().hcb_control_gate(self.consumer_id, device, closed)

    def emit(self, count: int) -> None:
        for _ in range(count):
            self.gpu.tap(np.array([self.sent], np.int32), consumer_id=self.consumer_id)
            self.sent += 1

    @property
    def suppressed(self) -> int:
        return int(native.load().hcb_control_suppressed(self.consumer_id))


def arrived(gpu: Gpu) -> list[int]:
    """The values of all messages so far; their sequence numbers have no gap."""
    messages: list[Any] = []
    while gpu.source.counters().queued_messages:
        batch = gpu.source.read(0.05)
        if batch is not None:
            messages += [gpu.decode(*frame) for frame in batch.frames]
            batch.release()
    first = messages[0][2] if messages else 0
    assert [message[2] for message in messages] == [first + n for n in range(len(messages))]
    return [int(message[-1][0][0]) for message in messages]


@pytest.mark.slow
def test_every_nth_from_the_first_on(driver: Driver) -> None:
    tap = Tap(Gpu(driver))
    tap.rule(every=4)
    tap.emit(10)
    assert arrived(tap.gpu) == [0, 4, 8]
    assert tap.suppressed == 7
    tap.rule(every=4)
    tap.emit(2)
    assert arrived(tap.gpu) == [], "the same rule again keeps its count"
    tap.rule(every=3)
    tap.emit(4)
    assert arrived(tap.gpu) == [12, 15]
    tap.rule()
    tap.emit(2)
    assert arrived(tap.gpu) == [16, 17]
    counters = tap.gpu.source.counters()
    assert (counters.dropped, counters.discarded, counters.next_seq) == (0, 0, 7)


def test_each_device_counts_for_itself(driver: Driver) -> None:
    one, other = Gpu(driver, device_id=41), Gpu(driver, device_id=42)
    taps = Tap(one), Tap(other)
    taps[1].consumer_id = taps[0].consumer_id
    taps[0].rule(every=3)
    taps[0].emit(2)
    taps[1].emit(4)
    taps[0].emit(2)
    assert (arrived(one), arrived(other)) == ([0, 3], [0, 3])


def test_a_check_is_switched_off_on_one_device_or_on_all(driver: Driver) -> None:
    gpus = Gpu(driver, device_id=43), Gpu(driver, device_id=44)
    consumer_id = next(_consumers)

    def switch(*, off: bool, device: int = -1) -> None:
        assert native.load().hcb_switch(consumer_id, device, off) == native.EMITTED

    def failures() -> list[int]:
        for gpu in gpus:
            gpu.tap(np.array([False]), consumer_id=consumer_id, flags=Flags.CHECK)
        return [len(arrived(gpu)) for gpu in gpus]

    switch(off=True, device=43)
    assert failures() == [0, 1]
    switch(off=True)
    assert failures() == [0, 0]
    switch(off=False)
    assert failures() == [0, 1], "it is still off on one device"
    switch(off=False, device=43)
    assert failures() == [1, 1]


def test_a_rate_lets_one_message_through_and_the_next_ones_not(driver: Driver) -> None:
    tap = Tap(Gpu(driver))
    tap.rule(interval_ns=3600 * SECOND)
    tap.emit(50)
    assert arrived(tap.gpu) == [0]
    assert tap.suppressed == 49
    tap.rule(interval_ns=1)
    tap.emit(3)
    assert arrived(tap.gpu) == [50, 51, 52]


def test_a_closed_gate_lets_probes_through(driver: Driver) -> None:
    tap = Tap(Gpu(driver))
    tap.rule(probe_every=5)
    tap.emit(2)
    tap.gate(closed=True)
    tap.emit(11)
    assert arrived(tap.gpu) == [0, 1, 6, 11]
    tap.gate(closed=False, device=8)
    tap.emit(1)
    assert arrived(tap.gpu) == [], "the gate of another device"
    tap.gate(closed=False)
    tap.emit(2)
    assert arrived(tap.gpu) == [14, 15]


def test_a_gate_probes_by_time_too(driver: Driver) -> None:
    tap = Tap(Gpu(driver))
    tap.rule(probe_ns=3600 * SECOND)
    tap.gate(closed=True)
    tap.emit(200)
    assert arrived(tap.gpu) == []
    tap.rule(probe_ns=1)
    tap.emit(2)
    assert arrived(tap.gpu) == [200, 201], "the shorter time holds at once"
    tap.rule()
    tap.emit(1)
    assert arrived(tap.gpu) == [202], "without the rule there is no gate"


def test_rules_hold_together(driver: Driver) -> None:
    tap = Tap(Gpu(driver))
    tap.rule(every=2, interval_ns=3600 * SECOND, off=1)
    tap.emit(5)
    assert arrived(tap.gpu) == []
    tap.rule(every=2, interval_ns=3600 * SECOND)
    tap.emit(5)
    assert arrived(tap.gpu) == [5]
    assert tap.suppressed == 9


def test_refused_messages_are_never_copied(driver: Driver, gpu: Gpu) -> None:
    tap = Tap(gpu)
    tap.rule(every=1000)
    tap.emit(1)
    assert arrived(gpu) == [0]
    before = driver.count("cuMemcpyDtoHAsync_v2")
    tap.emit(20)
    assert driver.count("cuMemcpyDtoHAsync_v2") == before


def test_checks_are_switched_and_nothing_else(gpu: Gpu) -> None:
    tap = Tap(gpu)
    fails = np.array([False])
    tap.rule(every=10, interval_ns=3600 * SECOND, truncate=1)
    for value in range(3):
        gpu.tap(fails, np.arange(4) + value, consumer_id=tap.consumer_id, flags=Flags.CHECK)
    assert [message[-1][1].tolist() for message in gpu.take(3)] == [
        [n, n + 1, n + 2, n + 3] for n in range(3)
    ]
    tap.rule(off=1)
    gpu.tap(fails, consumer_id=tap.consumer_id, flags=Flags.CHECK)
    assert gpu.source.counters().queued_messages == 0


def test_threads_of_one_device_share_its_count(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(capacity_bytes=8 << 20))
    tap = Tap(gpu)
    tap.rule(every=10)
    address = gpu.put(np.array([3], np.int32))

    def emit(_: int) -> None:
        for _ in range(2_000):
            gpu.tap(np.array([3], np.int32), consumer_id=tap.consumer_id, addresses=[address])

    in_threads(emit, 4)
    assert len(arrived(gpu)) == 800
    assert tap.suppressed == 7_200


@pytest.mark.parametrize("elements", [1, 7, 100, 40_000])
def test_only_the_heads_are_copied(gpu: Gpu, elements: int) -> None:
    tap = Tap(gpu)
    tap.rule(truncate=elements)
    arrays = [
        np.arange(50_000, dtype=np.float32),
        np.array([5], np.int64),
        np.arange(101).astype(ml_dtypes.int4),
        np.zeros(0, np.int8),
        np.arange(200, dtype=np.complex64),
    ]
    gpu.tap(*arrays, consumer_id=tap.consumer_id)
    ((_, flags, *_, sent),) = gpu.take(1)
    assert flags & Flags.TRUNCATED
    heads = split_truncated(sent, 0)
    for head, array in zip(heads, arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(head), array[:elements])
        assert head.dtype == array.dtype
        assert isinstance(head, TruncatedArray) == (array.size > elements)
        assert getattr(head, "whole_shape", array.shape) == array.shape


def test_nothing_changes_where_all_arrays_are_small(gpu: Gpu) -> None:
    tap = Tap(gpu)
    tap.rule(truncate=4)
    gpu.tap(np.arange(4), np.array([1]), consumer_id=tap.consumer_id)
    ((_, flags, *_, sent),) = gpu.take(1)
    assert not flags & Flags.TRUNCATED
    assert [array.tolist() for array in sent] == [[0, 1, 2, 3], [1]]


@pytest.mark.parametrize("change", [{"off": 1}, {"every": 2}, {"interval_ns": 3600 * SECOND}])
def test_the_first_device_decides_for_all_shards_of_a_value(driver: Driver, change: dict[str, int]) -> None:
    one, other = Gpu(driver, device_id=51), Gpu(driver, device_id=52)
    consumer_id = next(_consumers)
    record = np.array([-1, 2, 0, 1], np.int64)

    def emit(gpu: Gpu, count: int) -> None:
        for _ in range(count):
            gpu.tap(record, consumer_id=consumer_id, run_id=5, handler="hcb_gpu_tap_shard")

    emit(one, 3)  # sent before anything was ruled, so the other device sends them as well
    library = native.load()
    library.hcb_control_set(consumer_id, native.Control(**change))
    emit(other, 5)
    library.hcb_control_set(consumer_id, native.Control())
    emit(one, 4)
    emit(other, 2)
    assert arrived(one) == arrived(other)
    assert library.hcb_control_suppressed(consumer_id) == (2 if "off" in change else 1), "values, not shards"
