"""Taps on a GPU, with a driver that has none: the real handlers, ring and source, and copies that end late."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compiling import needs_compiler
from fake_gpu import Driver, Gpu, Stream
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix

pytestmark = [pytest.mark.native_only, needs_compiler]

# All that a tap may ask of the driver: nothing of it waits for the device.
EVERY_TIME = {
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
}
ONCE = {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemHostRegister_v2"}


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def test_a_tap_is_delivered(driver: Driver) -> None:
    gpu = Gpu(driver, device_id=5)
    assert gpu.tap(floats(1.5, -2), consumer_id=77, run_id=3, flags=Flags.ORDERED) is None
    ((consumer_id, flags, seq, time_ns, run_id, device, arrays),) = gpu.take(1)
    assert (consumer_id, flags, seq, run_id, device) == (77, Flags.ORDERED, 0, 3, 5)
    assert arrays[0].tolist() == [1.5, -2]
    assert time_ns > 0


def test_the_handler_returns_before_the_device_has_computed_the_operands(driver: Driver) -> None:
    driver.hold()
    gpu = Gpu(driver)
    for value in range(3):
        assert gpu.tap(floats(value)) is None
    assert not gpu.stream.idle()
    assert gpu.source.read(0.02) is None, "nothing has been computed yet"
    driver.resume()
    assert gpu.values(3) == [[0], [1], [2]]


def test_nothing_on_the_way_of_a_tap_waits_for_the_device(driver: Driver, gpu: Gpu) -> None:
    for value in range(300):
        gpu.tap(floats(value), np.zeros(50_000, np.float32) if value % 100 == 0 else floats())
    gpu.take(300)
    assert driver.called() == EVERY_TIME | ONCE
    assert driver.count("cuEventRecord") == 300
    assert driver.count("cuMemcpyDtoHAsync_v2") == 303
    driver.reset()
    gpu.tap(floats(1))
    gpu.take(1)
    assert driver.called() == EVERY_TIME - {"cuEventCreate"}, "events and pinned memory are used again"


def test_the_ring_is_pinned_before_the_first_tap(driver: Driver, gpu: Gpu) -> None:
    assert driver.called() >= ONCE
    driver.reset()
    gpu.tap(floats(1))
    gpu.take(1)
    assert driver.called() == EVERY_TIME


def test_the_reader_asks_for_events_while_copies_are_pending_only_and_not_often(
    driver: Driver, gpu: Gpu
) -> None:
    driver.hold()
    gpu.tap(floats(1))
    assert gpu.source.read(0.3) is None
    asked = driver.count("cuEventQuery")
    assert 1 < asked < 1000, "some 600 in 0.3 s at the pace for long programs"
    driver.resume()
    gpu.take(1)
    asked = driver.count("cuEventQuery")
    assert gpu.source.read(0.1) is None
    assert driver.count("cuEventQuery") == asked


@pytest.mark.parametrize("waiting", [False, True], ids=["room", "no room"])
def test_large_copies_in_a_stream_do_not_keep_the_reader_busy(driver: Driver, waiting: bool) -> None:
    gpu = Gpu(driver, RingConfig(block_budget_bytes=2_500_000))
    large = np.zeros(250_000, np.float32)
    addresses = [gpu.put(large)]
    gpu.tap(large, addresses=addresses)
    gpu.take(1)
    driver.hold()
    count = 4 if waiting else 2
    launching = threading.Thread(target=lambda: [gpu.tap(large, addresses=addresses) for _ in range(count)])
    launching.start()
    while gpu.source.counters().emitted < 3 or waiting > gpu.source.counters().waiting_producers:
        pass
    driver.functions.fake_reset()
    assert gpu.source.read(0.2) is None
    assert driver.count("cuEventQuery") < 1000
    driver.resume()
    gpu.take(count)
    launching.join()


def test_a_buffer_that_the_program_overwrites_arrives_as_it_was(driver: Driver) -> None:
    # As the carry of a scan: written, tapped, written again, all in one stream.
    driver.functions.fake_delay(20)
    gpu = Gpu(driver)
    address = gpu.put(floats(0))
    for value in range(200):
        gpu.stream.write(address, floats(value).tobytes())
        gpu.tap(floats(value), addresses=[address])
    gpu.stream.write(address, floats(-1).tobytes())
    assert gpu.values(200) == [[value] for value in range(200)]


DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32,
    np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4,
    ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn,
]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 3, 5, 257])
def test_every_dtype_arrives(gpu: Gpu, size: int) -> None:
    arrays = [np.resize(np.array([1, 0, 1]), size).astype(dtype) for dtype in DTYPES]
    assert gpu.tap(*arrays) is None
    ((*_, received),) = gpu.take(1)
    assert [array.dtype for array in received] == [array.dtype for array in arrays]
    for array, sent in zip(received, arrays, strict=True):
        np.testing.assert_array_equal(array, sent)


def test_elements_of_less_than_a_byte_come_without_adjacent_bytes(gpu: Gpu) -> None:
    gpu.tap(np.array([1, 2, 3], ml_dtypes.uint4), np.array([1], ml_dtypes.int2))
    batch = gpu.source.read(30)
    ((memory, offset, _),) = batch.frames
    payload = bytes(memory[offset + 128 : offset + 128 + 9])
    assert payload == bytes([0x21, 0x03, 0, 0, 0, 0, 0, 0, 0x01])
    batch.release()


def test_large_arrays_travel_in_pinned_blocks_that_are_used_again(driver: Driver, gpu: Gpu) -> None:
    sent = np.arange(4 << 20, dtype=np.float32)  # 16 MiB
    address = gpu.put(sent)
    for _ in range(5):
        gpu.tap(sent, addresses=[address])
        ((*_, (array,)),) = gpu.take(1)
        np.testing.assert_array_equal(array, sent)
        del array
    # The ring, a block that a copy is written into, and one that the last batch still holds.
    assert driver.count("cuMemHostRegister_v2") == 3
    assert driver.functions.fake_pageable() == 0


def test_a_kept_array_keeps_its_block(gpu: Gpu) -> None:
    kept = []
    for value in range(4):
        gpu.tap(np.full(100_000, value, np.float32))
        kept.append(gpu.take(1)[0][-1][0])
    assert [set(array.tolist()) for array in kept] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_blocks_beyond_the_stock_are_unpinned(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(block_budget_bytes=1 << 20))
    before = driver.functions.fake_registered_bytes()
    kept = []
    for _ in range(4):
        gpu.tap(np.zeros(100_000, np.float32))
        kept.append(gpu.take(1)[0][-1][0])
    kept.clear()
    assert driver.count("cuMemHostUnregister") == 1, (
        "of four, the stock takes two, and the last batch holds one"
    )
    pinned = driver.functions.fake_registered_bytes() - before
    assert pinned == 3 * (400_000 + 64)


def test_the_ring_wraps_while_copies_are_late(driver: Driver) -> None:
    driver.functions.fake_delay(30)
    gpu = Gpu(driver, RingConfig(capacity_bytes=4096))
    count = 500
    # Without room the launching thread waits, and the device goes on.
    launching = threading.Thread(
        target=lambda: [gpu.tap(np.full(1 + value % 90, value, np.float32)) for value in range(count)]
    )
    launching.start()
    assert gpu.values(count) == [[value] * (1 + value % 90) for value in range(count)]
    launching.join()
    assert gpu.source.counters().dropped == 0


def test_a_budget_for_blocks_holds_the_thread_that_launches(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(block_budget_bytes=500_000))
    launching = threading.Thread(
        target=lambda: [gpu.tap(np.full(100_000, value, np.float32)) for value in range(20)]
    )
    launching.start()
    assert [set(values) for values in gpu.values(20)] == [{float(value)} for value in range(20)]
    launching.join()


def test_messages_that_find_no_room_are_dropped_by_a_dropping_policy(driver: Driver) -> None:
    driver.hold()
    gpu = Gpu(driver, RingConfig(capacity_bytes=4096, policy=Policy.DROP_NEWEST))
    for value in range(100):
        assert gpu.tap(floats(value)) is None
    counters = gpu.source.counters()
    assert counters.emitted + counters.dropped == counters.next_seq == 100
    assert counters.dropped > 0
    driver.resume()
    assert gpu.values(counters.emitted) == [[value] for value in range(counters.emitted)]
    gpu.tap(floats(7))
    assert gpu.take(1)[0][2] == 100, "a drop spends a sequence number"


def test_streams_of_one_device_each_keep_their_order(driver: Driver) -> None:
    driver.functions.fake_delay(5)
    gpu = Gpu(driver, RingConfig(capacity_bytes=1 << 14))
    count, producers = 150, 4

    def launch(number: int) -> None:
        stream = Stream(driver)
        address = gpu.put(floats(-1), stream)
        for value in range(count):
            stream.write(address, floats(value).tobytes())
            gpu.tap(floats(value), consumer_id=number, addresses=[address], stream=stream)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(producers)]
    for thread in threads:
        thread.start()
    messages = gpu.take(count * producers)
    for thread in threads:
        thread.join()
    assert [message[2] for message in messages] == list(range(count * producers))
    for number in range(producers):
        values = [message[-1][0].tolist() for message in messages if message[0] == number]
        assert values == [[value] for value in range(count)]


def test_messages_from_the_host_keep_their_place_behind_copies(driver: Driver) -> None:
    driver.hold()
    gpu = Gpu(driver)
    gpu.tap(floats(1))
    gpu.source.send_end(123)
    assert gpu.source.read(0.02) is None
    driver.resume()
    tap, end = gpu.take(2)
    assert tap[-1][0].tolist() == [1]
    assert (end[0], end[1]) == (123, Flags.END_OF_STREAM)


def test_results_that_are_not_aliases_are_copied_on_the_device(driver: Driver, gpu: Gpu) -> None:
    source, target = gpu.put(floats(4, 5)), gpu.put(floats(0, 0))
    assert gpu.tap(floats(4, 5), addresses=[source], results=[target]) is None
    assert gpu.tap(floats(4, 5), addresses=[source], results=[source]) is None
    gpu.take(2)
    assert driver.count("cuMemcpyDtoDAsync_v2") == 1
    copied = np.zeros(2, np.float32)
    driver.functions.fake_read(target, copied.ctypes.data_as(driver.functions.fake_read.argtypes[1]), 8)
    assert gpu.tap(copied, addresses=[target]) is None
    assert gpu.values(1) == [[4, 5]]


def test_shards_are_numbered_by_the_host(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(capacity_bytes=4096, policy=Policy.DROP_NEWEST))
    record = np.array([-1, 4, 0, 2, 8, 4], np.int64)
    for run_id in (1, 1, 2):
        gpu.tap(record, floats(1), run_id=run_id, handler="hcb_gpu_tap_shard")
    assert gpu.values(3) == [[n, 4, 0, 2, 8, 4] for n in (0, 1, 0)]
    driver.hold()
    while not gpu.source.counters().dropped:
        gpu.tap(record, floats(1), run_id=3, handler="hcb_gpu_tap_shard")
    emitted = gpu.source.counters().emitted - 3
    driver.resume()
    assert [values[0] for values in gpu.values(emitted)] == list(range(emitted))
    gpu.tap(record, floats(1), run_id=3, handler="hcb_gpu_tap_shard")
    assert gpu.values(1)[0][0] == emitted + 1, "a dropped message counts"


def test_a_shard_without_its_record_is_refused(gpu: Gpu) -> None:
    assert "no shard record" in (gpu.tap(handler="hcb_gpu_tap_shard") or "")
    assert gpu.source.counters().emitted == 0


def test_metadata_that_can_never_fit_are_refused(driver: Driver) -> None:
    gpu = Gpu(driver, RingConfig(capacity_bytes=4096))
    assert "half of the device's ring" in (gpu.tap(*[floats()] * 1000) or "")


@pytest.mark.parametrize("handler", ["hcb_gpu_tap", "hcb_gpu_tap_shard"])
def test_command_buffers_do_not_record_taps(driver: Driver, handler: str) -> None:
    function = ctypes.cast(getattr(Gpu(driver).library, handler), ctypes.c_void_p)
    assert not driver.functions.command_buffer_compatible(function)


def test_calls_from_the_host_queue_with_taps(driver: Driver) -> None:
    driver.hold()
    gpu = Gpu(driver)
    gpu.tap(floats(1))
    argument = np.array([1, 2, 3], ml_dtypes.int4)
    spec = ArraySpec.of(argument.dtype, argument.shape)
    results: list[Any] = []
    program = threading.Thread(
        target=lambda: results.extend(
            gpu.source.call(encode_prefix(8, Flags.CALL, [spec]), [argument], [spec])
        )
    )
    program.start()
    while not gpu.library.hcb_call_count(gpu.source.device):
        pass
    driver.resume()
    tap, call = gpu.take(2)
    assert tap[-1][0].tolist() == [1]
    assert (call[0], call[-1][0].tolist()) == (8, [1, 2, 3])
    gpu.source.resume(gpu.source.reply(call[2], [np.array([3, 2, -1], ml_dtypes.int4)]))
    program.join(30)
    assert results[0].dtype == ml_dtypes.int4
    assert results[0].tolist() == [3, 2, -1]
