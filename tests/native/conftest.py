"""Rings of their own for the tests of the native transport, and a producer for each."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_gpu import Driver, build

from receiver import wire
from receiver.native import bindings as native
from receiver.sources.ring import RingSource
from receiver.sources.ring_batch import RingBatch
from receiver.sources.ring_config import RingConfig

# Rings live as long as the process, so that every test takes a new device. Real ordinals are far from these.
_devices = itertools.count(1_000_000)


class Received(NamedTuple):
    """One frame, copied out of the ring."""

    header: wire.Header
    payload: bytes
    external: Any


class TestRing:
    """A ring with both of its sides."""

    __test__ = False

    def __init__(self, config: RingConfig) -> None:
        self.device = next(_devices)
        self.source = RingSource.open(self.device, config)
        self.library = native.load()
        self.handle = self.library.hcb_ring_get(self.device)

    def send(self, payload: bytes = b"12345678", consumer_id: int = 1, run_id: int = 0) -> int:
        """Emits one uint8 array; waits if the policy says so."""
        prefix = wire.encode_prefix(consumer_id, 0, (wire.ArraySpec.of(np.dtype(np.uint8), (len(payload),)),))
        address = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p))
        nbytes = (ctypes.c_uint64 * 1)(len(payload))
        return self.library.hcb_ring_send(self.handle, prefix, len(prefix), 1, address, nbytes, run_id)

    def fill(self, payload: bytes = b"12345678") -> int:
        """Sends until the ring is full (the policy must be a dropping one); returns how many found room."""
        return next(count for count in itertools.count() if self.send(payload) == native.DROPPED)

    def produce(self, threads: int, count: int, nbytes: int) -> int:
        """Native threads that send `count` frames each; returns how many were emitted."""
        return self.library.hcb_test_produce(self.handle, threads, count, nbytes)

    def take(self, count: int, timeout_sec: float = 30.0) -> list[Received]:
        """Reads and releases until `count` frames have come."""
        received: list[Received] = []
        while len(received) < count:
            batch = self.source.read(timeout_sec)
            assert batch is not None, f"only {len(received)} of {count} frames came"
            received += unpack(batch)
            batch.release()
        return received

    def corrupt(self, offset: int, data: bytes) -> None:
        """Writes into the ring's memory."""
        memory = memoryview(self.source.memory)
        memory[offset : offset + len(data)] = data

    @property
    def counters(self) -> Any:
        """The source's counters."""
        return self.source.counters()


def unpack(batch: RingBatch) -> list[Received]:
    """Copies the frames of a batch."""
    received = []
    for memory, offset, external in batch.frames:
        header = wire.decode_header(memory, offset)
        start = offset + 64 + (header.meta_bytes + 63) // 64 * 64
        payload = bytes(memory[start : start + header.payload_bytes]) if external is None else bytes(external)
        received.append(Received(header, payload, external))
    return received


@pytest.fixture
def make_ring() -> Callable[..., TestRing]:
    """Makes a ring of 4 KiB, or as the keywords say."""

    def make(**config: Any) -> TestRing:
        return TestRing(RingConfig(**{"capacity_bytes": 4096, **config}))

    return make


@pytest.fixture(scope="session")
def the_driver(tmp_path_factory: Any) -> Driver:
    """The fake GPU driver, which this process goes on using."""
    driver = Driver(build(tmp_path_factory.mktemp("driver") / "libfake_cuda.so"))
    driver.open()
    return driver


@pytest.fixture
def driver(the_driver: Driver) -> Iterator[Driver]:
    """The fake GPU driver, behaving well. Fails a test that misused it."""
    the_driver.reset()
    yield the_driver
    violations, depth = the_driver.functions.fake_violations(), the_driver.functions.fake_context_depth()
    the_driver.reset()
    assert violations == 0, (
        "host memory was copied as though it were the device's, or pinned memory was given up in use"
    )
    assert depth == 0, "the handler left its context behind"


@pytest.fixture
def stalls() -> Callable[[int], None]:
    """Waits until a producer of the given device has begun to wait."""
    # Not by the library's own event: in a whole run the package's supervisor thread takes that.
    library = native.load()
    counters = native.Counters()

    def wait(device: int) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            library.hcb_ring_counters(library.hcb_ring_get(device), counters)
            if counters.waiting_producers:
                return
        pytest.fail("no producer waited")

    return wait


@pytest.fixture
def run_program() -> Callable[..., str]:
    """Runs a scenario of `ffi_program.py` or `fork_program.py` in a process of its own."""

    def run(program: str, arguments: Sequence[str] = (), timeout_sec: float = 100) -> str:
        # The program's own folder too: with PYTHONSAFEPATH set, Python does not add it.
        paths = [Path(native.__file__).parents[2], Path(__file__).parent]
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(program)), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=timeout_sec,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
