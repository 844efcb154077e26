"""Checks on a GPU: whether one holds is known when its predicate has been copied, and to the receiver only."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from compiling import needs_compiler
from fake_gpu import Driver, Gpu
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix

pytestmark = [pytest.mark.native_only, needs_compiler]

CHECK = Flags.CHECK | Flags.ORDERED
HOLDS, FAILS = np.array([True, True]), np.array([True, False])


def check(gpu: Gpu, predicate: Any, value: float = 0, **options: Any) -> str | None:
    return gpu.tap(predicate, np.array([value], np.float32), flags=CHECK, **options)


@pytest.mark.slow
def test_a_check_that_holds_sends_nothing_and_spends_no_number(gpu: Gpu) -> None:
    for value in range(10):
        check(gpu, FAILS if value % 4 == 3 else HOLDS, value)
    gpu.tap(np.array([5], np.int32))
    messages = gpu.take(3)
    assert [message[2] for message in messages] == [0, 1, 2]
    assert [message[-1][-1].tolist() for message in messages] == [[3], [7], [5]]
    counters = gpu.settle()
    assert (counters.emitted, counters.discarded, counters.dropped, counters.next_seq) == (11, 8, 0, 3)


def test_the_predicate_is_the_array_that_the_prefix_names(gpu: Gpu) -> None:
    zeros = np.zeros(3, np.int8)
    gpu.tap(zeros, HOLDS, flags=CHECK, predicate=1)
    gpu.tap(zeros, FAILS, flags=CHECK, predicate=1)
    gpu.tap(zeros, np.zeros(0, bool), flags=CHECK, predicate=1)
    ((_, _, seq, *_, arrays),) = gpu.take(1)
    assert (seq, arrays[1].tolist()) == (0, [True, False])
    assert gpu.settle().discarded == 2


def test_large_arrays_of_a_check_that_holds_go_back_to_the_pool(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(block_budget_bytes=300_000))
    values = np.arange(50_000, dtype=np.float32)
    for _ in range(10):
        gpu.tap(HOLDS, values, flags=CHECK)
        gpu.settle()
    gpu.tap(FAILS, values, flags=CHECK)
    ((*_, arrays),) = gpu.take(1)
    np.testing.assert_array_equal(arrays[1], values)
    assert driver.count("cuMemHostRegister_v2") == 2, "the ring and one block"
    assert gpu.source.counters().queued_bytes == 0


def test_failures_in_a_row_are_folded_as_on_cpu(driver: Driver, gpu: Gpu) -> None:
    driver.hold()
    for value in range(70):
        check(gpu, HOLDS)
        gpu.tap(FAILS, np.array([value]), flags=CHECK | Flags.FOLDS)
    driver.resume()
    while not gpu.stream.idle():
        pass
    received, folded = [], []
    while sum(folded) + len(received) < 70:
        batch = gpu.read()
        received += [gpu.decode(*frame)[2] for frame in batch.frames]
        folded += batch.folded
        batch.release()
    assert received == [*range(64), 69]
    assert sum(folded) == 5


def test_switched_off_taps_cost_no_copy(driver: Driver) -> None:
    gpu = Gpu(driver, device_id=31)
    gpu.tap(HOLDS, flags=CHECK)
    before = driver.count("cuMemcpyDtoHAsync_v2")
    gpu.library.hcb_switch(444, 31, 1)
    check(gpu, FAILS, consumer_id=444)
    gpu.library.hcb_switch(444, 31, 0)
    gpu.library.hcb_switch_all_checks(1)
    check(gpu, FAILS, consumer_id=444)
    gpu.library.hcb_switch_all_checks(0)
    assert driver.count("cuMemcpyDtoHAsync_v2") == before
    check(gpu, FAILS, 1, consumer_id=444)
    assert gpu.take(1)[0][-1][1].tolist() == [1]


def test_a_failure_ends_its_launch_at_the_next_tap_after_it_was_seen(driver: Driver) -> None:
    gpu = Gpu(driver, device_id=32)
    gpu.library.hcb_abort_on_check(32, 1)
    driver.hold()
    assert check(gpu, FAILS, run_id=70) is None
    assert check(gpu, HOLDS, run_id=70) is None, "the result is not known yet"
    driver.resume()
    gpu.take(1)
    assert "a check failed" in (check(gpu, HOLDS, run_id=70) or "")
    assert check(gpu, HOLDS, run_id=71) is None
    gpu.library.hcb_abort_on_check(32, 0)
    assert check(gpu, HOLDS, run_id=70) is None
    assert gpu.settle().discarded == 3


def test_shards_of_a_check_are_numbered_by_its_failures(gpu: Gpu) -> None:
    record = np.array([-1, 2, 0, 1], np.int64)
    for predicate in (HOLDS, FAILS, HOLDS, FAILS):
        gpu.tap(record, predicate, flags=CHECK, predicate=1, run_id=5, handler="hcb_gpu_tap_shard")
    assert [values[0] for values in gpu.values(2)] == [0, 1]


def test_shards_are_counted_where_their_tap_is_off(driver: Driver) -> None:
    gpu = Gpu(driver, device_id=33)
    record = np.array([-1, 2, 0, 1], np.int64)

    def tap() -> None:
        gpu.tap(record, consumer_id=601, handler="hcb_gpu_tap_shard")
        gpu.tap(record, FAILS, consumer_id=602, flags=CHECK, predicate=1, handler="hcb_gpu_tap_shard")

    for off in (0, 1, 0):
        gpu.library.hcb_switch(601, -1, off)
        gpu.library.hcb_switch(602, 33, off)
        tap()
    assert [values[0] for values in gpu.values(4)] == [0, 0, 2, 2]
    assert gpu.settle().discarded == 1, "the check that was off, whose predicate had to be seen"


def test_a_call_behind_checks_that_hold_is_answered_by_its_own_number(gpu: Gpu) -> None:
    for _ in range(3):
        check(gpu, HOLDS)
    spec = ArraySpec.of(np.dtype(np.float32), (1,))
    results: list[Any] = []
    prefix = encode_prefix(8, Flags.CALL, [spec])
    argument = np.array([2], np.float32)
    program = threading.Thread(target=lambda: results.extend(gpu.source.call(prefix, [argument], [spec])))
    program.start()
    ((_, _, seq, *_),) = gpu.take(1)
    assert seq == 0
    assert gpu.source.reply(3, [argument]) is None, "what it was before the checks were known to hold"
    gpu.source.resume(gpu.source.reply(0, [argument * 2]))
    program.join(30)
    assert results[0].tolist() == [4]


class Received:
    """A receiver of one GPU whose messages all go to `sink`."""

    def __init__(self, gpu: Gpu, sink: Any) -> None:
        registry = Registry()
        self.lease = registry.lease(Consumer(1, "tap", "here.py:1", sink))
        self.scope = Scope("gpu")
        self.receiver = DeviceReceiver("gpu:0", None, gpu.source, registry, self.scope)

    def wait(self) -> None:
        assert self.receiver.wait_consumed(self.receiver.source.counters().emitted, 30)


def test_a_barrier_ends_when_the_awaited_message_turned_out_to_be_none(gpu: Gpu) -> None:
    values: list[float] = []
    received = Received(gpu, lambda message: values.append(float(message.arrays[-1][0])))
    for value in range(50):
        check(gpu, HOLDS)
        if value % 10 == 0:
            gpu.tap(np.array([value], np.float32))
    received.wait()
    assert values == [0, 10, 20, 30, 40]
    check(gpu, HOLDS)
    received.wait()
    assert received.receiver.queued() == 0
    (stats,) = received.scope.stats
    assert (stats.delivered, stats.dropped) == (5, 0)
    assert received.receiver.stop(30)


def test_checks_behind_a_message_do_not_end_the_wait_for_it(gpu: Gpu) -> None:
    entered, let_go = threading.Event(), threading.Event()

    def sink(message: Any) -> None:
        entered.set()
        assert let_go.wait(30)

    received = Received(gpu, sink)
    gpu.tap(np.array([1], np.float32))
    assert entered.wait(30)
    gpu.tap(np.array([2], np.float32))
    emitted = gpu.source.counters().emitted
    for _ in range(20):
        check(gpu, HOLDS)
    while not gpu.stream.idle():
        pass
    assert not received.receiver.wait_consumed(emitted, 0.05)
    let_go.set()
    assert received.receiver.wait_consumed(emitted, 30)
    received.wait()
    assert received.receiver.stop(30)
