"""Fixtures for tests of the native transport: new rings, the fake GPU driver, programs to run."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkout import HELPERS
from fake_gpu import Driver, Gpu, build
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring_batch import RingConfig
from python_process import python_output
from rings import TestRing


@pytest.fixture
def make_ring() -> Callable[..., TestRing]:
    """Makes a ring of 4 KiB, or of the given options."""

    def make(**config: Any) -> TestRing:
        return TestRing(RingConfig(**{"capacity_bytes": 4096, **config}))

    return make


@pytest.fixture
def ring(make_ring: Callable[..., TestRing]) -> TestRing:
    """A ring of 4 KiB."""
    return make_ring()


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
    gc.collect()  # arrays give pinned memory back, which would count in the next test
    violations, depth = the_driver.functions.fake_violations(), the_driver.functions.fake_context_depth()
    the_driver.reset()
    assert violations == 0, (
        "host memory was copied as though it were the device's, or pinned memory was given up in use"
    )
    assert depth == 0, "the handler left its context behind"


@pytest.fixture
def gpu(driver: Driver) -> Gpu:
    """A device of the fake driver, with one stream."""
    return Gpu(driver)


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
def run_program(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Runs a scenario of a program that is in the folder of the test."""

    def run(program: str, arguments: Sequence[str] = (), timeout_sec: float = 100) -> str:
        paths = [Path(native.__file__).parents[2], Path(__file__).parent / "helpers", HELPERS]
        environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        path = request.path.with_name(program)
        return python_output(path, *arguments, timeout_sec=timeout_sec, **environment)

    return run
