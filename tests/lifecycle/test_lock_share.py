"""A busy receiver leaves the interpreter lock to other threads that want it, and Python's settings as they were."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from receiver import lock_share
from receiver.lock_share import SLICE_SEC

DEFAULT = sys.getswitchinterval()


@pytest.fixture(autouse=True)
def default_interval() -> Iterator[None]:
    hcb.barrier_wait()
    yield
    sys.setswitchinterval(DEFAULT)


def busy_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def nobody_delivers() -> None:
    # A receiver says that all is delivered before it is quite through.
    deadline = time.monotonic() + 10
    while lock_share._delivering:
        assert time.monotonic() < deadline


def tapped(tap: Any, steps: int) -> Any:
    return hcb.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(tap, c) + 1, None), x, None, length=steps)[0])


def test_a_thread_that_gives_the_lock_up_often_gets_it_back_soon() -> None:
    # Each of its calls lets the lock go, as a dispatch does. Without further ado each would wait for 5 ms.
    done = threading.Event()

    def tap(value: Any) -> None:
        busy_for(20e-6)
        if value == 49_999:
            done.set()

    program = tapped(tap, 50_000)
    program(jnp.float32(0)).block_until_ready()
    begin, calls = time.perf_counter(), 0
    while not done.is_set() and time.perf_counter() - begin < 1:
        os.stat(".")
        calls += 1
    elapsed = time.perf_counter() - begin
    hcb.barrier_wait()
    assert calls / elapsed > 2_000, f"{calls} calls in {elapsed} s"


def test_a_receiver_that_nobody_contends_with_does_not_rest() -> None:
    used = []
    thread: list[int] = []

    def tap(value: Any) -> None:
        thread[:] = [threading.get_ident()]
        busy_for(20e-6)

    program = tapped(tap, 10_000)
    program(jnp.float32(0)).block_until_ready()
    hcb.barrier_wait()
    for _ in range(5):
        clock = time.pthread_getcpuclockid(thread[0])
        begin, cpu = time.perf_counter(), time.clock_gettime(clock)
        program(jnp.float32(0)).block_until_ready()
        with hcb.outfeed_receiver(timeout_sec=60):  # its exit waits without the lock
            pass
        used.append((time.clock_gettime(clock) - cpu) / (time.perf_counter() - begin))
    # A receiver that rests would use a quarter of the time. Another process on its processor is no contention.
    assert max(used) > 0.5, used


def test_the_switch_interval_is_short_while_a_receiver_delivers_and_as_before_afterwards() -> None:
    seen: list[float] = []
    program = tapped(lambda value: seen.append(sys.getswitchinterval()), 10_000)
    program(jnp.float32(0))
    hcb.barrier_wait()
    assert min(seen) == pytest.approx(SLICE_SEC)
    nobody_delivers()
    assert sys.getswitchinterval() == DEFAULT


@pytest.mark.parametrize("interval", [10e-6, 1e-3])
def test_an_interval_that_the_user_sets_meanwhile_stays(interval: float) -> None:
    program = tapped(lambda value: sys.setswitchinterval(interval), 1)
    program(jnp.float32(0))
    hcb.barrier_wait()
    nobody_delivers()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_shorter_interval_is_left_alone() -> None:
    sys.setswitchinterval(20e-6)
    seen: list[float] = []
    program = tapped(lambda value: seen.append(sys.getswitchinterval()), 10)
    program(jnp.float32(0))
    hcb.barrier_wait()
    assert seen == pytest.approx([20e-6] * 10)
    nobody_delivers()
    assert sys.getswitchinterval() == pytest.approx(20e-6)
