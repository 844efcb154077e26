"""A GPU driver that fails: memory that cannot be pinned, copies and events that go wrong, no driver at all."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np
import pytest

from compiling import compile_program, needs_compiler
from fake_gpu import Driver, Gpu
from hostcallback.lifecycle import receivers as transport
from hostcallback.receiver import environment
from hostcallback.receiver.errors import LostMessagesError, NativeLibraryError
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.ring_batch import CorruptRingError, LostCopiesError, RingConfig

pytestmark = [pytest.mark.native_only, needs_compiler]

OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


def value(number: float) -> np.ndarray[Any, Any]:
    return np.array([number], np.float32)


def test_a_ring_that_cannot_be_pinned_is_used_all_the_same(driver: Driver) -> None:
    driver.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    gpu = Gpu(driver)
    for number in range(20):
        assert gpu.tap(value(number)) is None
    assert gpu.values(20) == [[number] for number in range(20)]
    assert driver.functions.fake_pageable() == 20
    assert gpu.source.counters().unpinned == 20


def test_a_block_that_cannot_be_pinned_is_not_kept(driver: Driver, gpu: Gpu) -> None:
    gpu.tap(value(0))
    gpu.take(1)
    driver.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, times=3)
    for number in range(6):
        gpu.tap(np.full(100_000, number, np.float32))
        assert set(gpu.values(1)[0]) == {number}
    assert gpu.source.counters().unpinned == 3
    assert driver.count("cuMemHostUnregister") == 0


LOST = {
    "the copy is refused": ("cuMemcpyDtoHAsync_v2", 0, "refused a copy"),
    "its second array is": ("cuMemcpyDtoHAsync_v2", 1, "refused a copy"),
    "the device fails": ("cuEventQuery", 0, "failed before it finished a copy"),
}


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize(("function", "skip", "text"), LOST.values(), ids=list(LOST))
def test_a_message_whose_copy_fails_is_lost_and_reported(
    driver: Driver, function: str, skip: int, text: str, external: bool, gpu: Gpu
) -> None:
    other = np.zeros(100_000 if external else 3, np.float32)
    gpu.tap(value(1), other)
    assert gpu.values(1) == [[1]]
    driver.fail(function, ILLEGAL_ADDRESS, skip=skip, times=1)
    assert gpu.tap(value(2), other) is None, "a tap is no reason for the program to fail"
    with pytest.raises(LostCopiesError, match=rf"1 message\(s\) were lost.*{text}.*700") as caught:
        gpu.read()
    assert caught.value.count == 1
    gpu.tap(value(3), other)
    ((_, _, seq, *_, arrays),) = gpu.take(1)
    assert (seq, arrays[0].tolist()) == (1, [3])
    counters = gpu.source.counters()
    assert (counters.emitted, counters.discarded, counters.dropped) == (3, 1, 0)
    assert counters.queued_bytes == 0


@pytest.mark.parametrize("function", ["cuEventCreate", "cuEventRecord"])
def test_without_an_event_the_stream_tells_when_a_copy_is_complete(driver: Driver, function: str) -> None:
    driver.fail(function, OUT_OF_MEMORY)
    driver.hold()
    gpu = Gpu(driver)
    for number in range(5):
        gpu.tap(value(number))
    assert gpu.source.read(0.02) is None
    driver.resume()
    assert gpu.values(5) == [[number] for number in range(5)]
    assert driver.count("cuStreamQuery") > 0


@pytest.mark.parametrize("function", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"])
def test_a_device_that_the_driver_does_not_open_loses_messages_and_nothing_else(
    driver: Driver, function: str
) -> None:
    driver.fail(function, 101)
    gpu = Gpu(driver)
    assert gpu.tap(value(1)) is None
    with pytest.raises(LostCopiesError, match=r"could not be used.*101"):
        gpu.read()
    driver.reset()
    gpu.tap(value(2))
    assert gpu.values(1) == [[2]]


def test_a_result_that_cannot_be_copied_fails_the_program(driver: Driver, gpu: Gpu) -> None:
    driver.fail("cuMemcpyDtoDAsync_v2", ILLEGAL_ADDRESS)
    target = gpu.put(value(0))
    assert "could not copy a tapped array to the result" in (gpu.tap(value(1), results=[target]) or "")


def test_losses_come_to_the_books_of_the_receiver_and_end_no_barrier_early(driver: Driver, gpu: Gpu) -> None:
    registry, scope = Registry(), Scope("gpu")
    received: list[float] = []
    lease = registry.lease(
        Consumer(1, "tap", "here.py:1", lambda message: received.append(float(message.arrays[0][0])))
    )
    receiver = DeviceReceiver("gpu:0", None, gpu.source, registry, scope)
    for number in range(40):
        if number % 10 == 5:
            driver.fail("cuMemcpyDtoHAsync_v2", ILLEGAL_ADDRESS, times=1)
        gpu.tap(value(number))
    assert receiver.wait_consumed(40, 30)
    assert received == [number for number in range(40) if number % 10 != 5]
    while receiver.queued():
        pass
    assert receiver.stop(30)
    error = scope.deferred.take()
    assert error is not None
    (lost,) = error.exceptions
    assert isinstance(lost, LostMessagesError)
    assert "refused a copy" in str(lost)
    assert scope.stats[0].dropped == 0
    del lease


def test_damage_in_a_frame_the_device_still_writes_is_skipped_when_the_copy_is_complete(
    driver: Driver,
) -> None:
    driver.hold()
    gpu = Gpu(driver, RingConfig(capacity_bytes=1 << 16))
    for number in range(3):
        gpu.tap(value(number), np.zeros(9000, np.float32) if number == 1 else value(0))
    memory = memoryview(gpu.source.memory)
    memory[192:195] = b"???"
    assert gpu.source.read(0.02) is None, "the reader must not pass what is written to"
    driver.resume()
    assert gpu.values(1) == [[0]]
    with pytest.raises(CorruptRingError) as caught:
        gpu.read()
    assert caught.value.skipped == 1
    assert gpu.values(1) == [[2]]


def opened(vendor: int, library: str) -> str:
    error = ctypes.create_string_buffer(500)
    assert not native.load().hcb_gpu_open(vendor, library.encode(), error, len(error))
    return error.value.decode()


def test_a_process_has_one_vendors_driver(driver: Driver) -> None:
    assert "another vendor" in opened(native.GPU_VENDORS["rocm"], str(driver.file))


def test_reports_name_the_missing_part(run_program: Any, tmp_path: Any) -> None:
    empty = tmp_path / "libempty.so"
    source = tmp_path / "empty.cc"
    source.write_text("")
    compile_program([source], empty, "-shared", "-fPIC")
    told = run_program("gpu_program.py", ["without_driver", str(empty)])
    assert "libcuda.so.1 cannot be loaded: libcuda.so.1: cannot open shared object file" in told
    assert "has no function cuMemcpyDtoHAsync_v2" in told
    assert "has no function hipMemcpyDtoHAsync" in told
    assert "HOSTCALLBACK_CUDA_LIBRARY" in told


def test_without_a_driver_taps_of_a_gpu_use_callbacks_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver(platform: str) -> None:
        raise NativeLibraryError(f"the GPU driver of {platform} cannot be loaded")

    monkeypatch.delenv(environment.TRANSPORT.name, raising=False)
    monkeypatch.setattr(native, "open_gpu", no_driver)
    monkeypatch.setattr(transport, "local_devices", lambda platform: [object()])
    choose = transport.use_native.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert not choose("cuda")
    assert "taps on cuda use the slower callback transport: the GPU driver of cuda" in caplog.text
    monkeypatch.setenv(environment.TRANSPORT.name, "native")
    with pytest.raises(NativeLibraryError):
        choose("cuda")


@pytest.mark.parametrize("scenario", ["fork", "exit", "pinning_warns_once", "rocm", "start"])
def test_scenario(run_program: Any, the_driver: Driver, scenario: str) -> None:
    run_program("gpu_program.py", [scenario, str(the_driver.file)])
