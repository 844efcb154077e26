"""A busy receiver leaves the interpreter lock to other threads that want it, and Python's settings as they were."""

from __future__ import annotations

import hashlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from receiver import lock_share, native_library as native
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


@pytest.mark.skipif(not native.available(), reason="without the native library receivers never rest")
def test_a_receiver_that_others_contend_with_leaves_them_most_of_the_time() -> None:
    # The thread computes without the lock for a while in each call, as a dispatch does.
    receiver: list[int] = []

    def tap(value: Any) -> None:
        receiver[:] = [threading.get_ident()]
        busy_for(20e-6)

    program = tapped(tap, 30_000)
    program(jnp.float32(0)).block_until_ready()
    data, shares = bytes(50_000), []
    for _ in range(5):
        clock = time.pthread_getcpuclockid(receiver[0])
        begin, used = time.perf_counter(), time.clock_gettime(clock)
        while time.perf_counter() - begin < 0.05:
            hashlib.sha256(data)
        shares.append((time.clock_gettime(clock) - used) / (time.perf_counter() - begin))
    hcb.barrier_wait()
    assert statistics.median(shares) < 0.6, shares


@pytest.mark.skipif(not native.available(), reason="without the native library receivers never rest")
def test_only_a_thread_that_had_to_wait_rests() -> None:
    used_while_others_waited = native.load_holding_lock().hcb_used_while_others_waited

    def use(seconds: float, wait: bool) -> int:
        used_while_others_waited()
        busy_for(seconds)
        if wait:
            threading.Event().wait(1e-3)
        return int(used_while_others_waited())

    # Somebody else may have wanted the lock just then, but not each time; to be preempted is no waiting.
    assert 0 in [use(50e-6, wait=False) for _ in range(100)]
    waited = [use(500e-6, wait=True) for _ in range(10)]
    assert min(waited) > 0
    assert max(waited) >= 400e3


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
