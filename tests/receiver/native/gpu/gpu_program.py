"""A process with a GPU that forks or ends, with the fake driver: `gpu_program.py SCENARIO LIBRARY`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import numpy as np

from fake_gpu import Driver, Gpu
from hostcallback.receiver.errors import CallFailedError, NativeLibraryError
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.runtime import Supervisor, runtime
from hostcallback.receiver.sources.ring_batch import LostCopiesError
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix


def value(number):
    return np.array([number], np.float32)


def fork(driver):
    """The parent goes on; the child has the arrays that it had, an empty ring, and never calls the driver."""
    gpu = Gpu(driver)
    kept = []
    for number in range(2):
        gpu.tap(np.full(100_000, number, np.float32))
        kept += [message[-1][0] for message in gpu.take(1)]
    driver.hold()
    gpu.tap(value(7))
    gpu.tap(np.full(100_000, 8, np.float32))
    child = os.fork()
    if child == 0:
        driver.functions.fake_reset()  # its lock is free: no thread of the parent was inside the driver
        counters = gpu.source.counters()
        assert (counters.emitted, counters.queued_messages, counters.next_seq) == (0, 0, 0)
        assert gpu.source.read(0) is None
        gpu.source.send_end(3)
        assert gpu.take(1)[0][0] == 3
        assert [set(array.tolist()) for array in kept] == [{0.0}, {1.0}]
        assert gpu.tap(value(1), addresses=[0]) is None
        try:
            gpu.read()
        except LostCopiesError as error:
            assert error.count == 1
        else:
            raise AssertionError("a GPU's tap in a child is lost, and said to be")
        kept[0][:] = 5
        kept.clear()
        assert not driver.called(), driver.called()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    driver.resume()
    assert gpu.values(2)[0] == [7]
    kept.clear()
    for number in range(5):
        gpu.tap(value(number), np.full(100_000, number, np.float32))
        (message,) = gpu.take(1)
        assert message[-1][0].tolist() == [number]
        assert set(message[-1][1].tolist()) == {float(number)}
        del message
    assert driver.functions.fake_violations() == 0


def exit_(driver):
    """The process ends while copies are pending and a reader polls: it ends, without a call of the driver."""
    gpu = Gpu(driver)
    driver.hold()
    for number in range(100):
        gpu.tap(value(number))
    reader = threading.Thread(target=lambda: gpu.source.read(None), daemon=True)
    reader.start()
    while driver.count("cuEventQuery") < 3:
        pass


def pinning_warns_once(driver):
    """One warning and a counter."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hostcallback").addHandler(handler)
    driver.fail("cuMemHostRegister_v2", 2)
    Supervisor(runtime)
    gpu = Gpu(driver, ordinal=4)
    for number in range(50):
        gpu.tap(value(number))
    gpu.take(50)
    while not records:
        pass
    gpu.tap(np.zeros(100_000, np.float32))
    gpu.take(1)
    assert gpu.source.counters().unpinned == 51
    (record,) = records
    assert "could not pin memory for the taps of GPU 4" in record.getMessage()


def rocm(driver):
    """HIP's functions, and the thread's own device is back afterwards."""
    gpu = Gpu(driver, ordinal=3)
    for number in range(20):
        assert gpu.tap(value(number), np.full(100_000, number, np.float32)) is None
        assert driver.functions.fake_hip_device() == 7
    assert gpu.values(20) == [[number] for number in range(20)]
    assert driver.functions.fake_hip_device() == 7
    assert not any("Ctx" in name for name in driver.called())


def start(driver):
    """The package starts the receivers of a platform's GPUs: handlers registered, rings found by the FFI's ordinals."""
    import jax

    from hostcallback.lifecycle import receivers as transport
    from hostcallback.receiver.messages import Consumer

    class Device:
        platform, id, local_hardware_id = "gpu", 1027, 3

    registered = {}

    def register(target, handler, platform):
        registered[platform, target] = handler

    device, received = Device(), []
    transport.local_devices = lambda platform: [device]
    jax.ffi.register_ffi_target = register
    os.environ["HOSTCALLBACK_CUDA_LIBRARY"] = str(driver.file)
    transport.start("cuda")
    assert sorted(registered) == [("CUDA", "hostcallback_tap"), ("CUDA", "hostcallback_tap_shard")]
    lease = runtime.registry.lease(Consumer(8, "tap", "here.py:1", received.append))
    (receiver,) = runtime.receivers(["gpu:1027"])
    gpu = Gpu(driver, ordinal=3, device_id=1027)
    gpu.tap(value(5), consumer_id=8)
    assert receiver.wait_consumed(1, 30)
    (message,) = received
    assert message.device is device
    assert message.arrays[0].tolist() == [5]
    # A call goes by Python, in its place among the taps.
    results = []

    def add_one(message):
        results.append(len(received))
        return [message.arrays[0] + 1]

    call = runtime.registry.lease(Consumer(9, "add_one", "here.py:2", add_one))
    spec = ArraySpec.of(np.dtype(np.float32), (1,))
    prefix = encode_prefix(9, Flags.CALL, [spec])
    ask = transport.callback_caller("cuda", prefix, [np.dtype(np.float32)], [spec], [device])
    for number in range(20):
        gpu.tap(value(number), consumer_id=8)
        assert ask(0, value(number))[0].tolist() == [number + 1]
    assert results == list(range(2, 22))
    failing = transport.callback_caller(
        "cuda", encode_prefix(10, Flags.CALL, [spec]), [np.dtype(np.float32)], [spec], [device]
    )
    try:
        failing(0, value(1))
    except CallFailedError as error:
        assert "does not know" in str(error)
    else:
        raise AssertionError("a call without a host function came back")
    assert runtime.default_scope.deferred.take() is not None
    del lease, call


def without_driver(file):
    """Prints the missing part."""
    for platform in ("cuda", "rocm"):
        variable = f"HOSTCALLBACK_{platform.upper()}_LIBRARY"
        for name in ("", file):
            os.environ[variable] = name
            try:
                native.open_gpu(platform)
            except NativeLibraryError as error:
                print(error)


def main():
    scenario, file = sys.argv[1:]
    if scenario == "without_driver":
        without_driver(file)
        return
    driver = Driver(Path(file))
    driver.open(native.GPU_VENDORS["rocm" if scenario == "rocm" else "cuda"])
    scenarios = {
        "fork": fork,
        "exit": exit_,
        "pinning_warns_once": pinning_warns_once,
        "rocm": rocm,
        "start": start,
    }
    scenarios[scenario](driver)


if __name__ == "__main__":
    main()
