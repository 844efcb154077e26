"""One barrier waits for the taps of the programs that tap functions dispatch while it waits."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import dispatch
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import inflight
from recorder import Recorder


@pytest.mark.parametrize("place", ["same device", "another device"])
def test_one_barrier_waits_for_the_taps_of_tap_functions(place: str) -> None:
    waits, innermost = threading.Event(), Recorder()
    last = jax.devices()[-1] if place == "another device" else jax.devices()[0]
    third = jax.jit(lambda x: hcb.id_tap(innermost, x))
    second = jax.jit(lambda x: hcb.id_tap(lambda value: third(value), x))

    def first(value: Any) -> None:
        waits.wait(30)  # until the barrier has counted the messages that there are
        second(jax.device_put(value, last))

    program = jax.jit(lambda: lax.scan(lambda carry, i: (carry, hcb.id_tap(first, i)), 0, jnp.arange(20))[1])
    program()
    receiver = runtime.receivers()[0]
    barrier = threading.Thread(target=hcb.barrier_wait)
    barrier.start()
    while not receiver._awaited and barrier.is_alive():
        pass
    waits.set()
    barrier.join(60)
    assert not barrier.is_alive()
    assert sorted(innermost.values) == [*range(20)]


def _fresh_jit(inner: Any) -> Any:
    return lambda value: jax.jit(lambda x: inner(x))(value)  # each is traced and compiled


def _ahead_of_time(inner: Any) -> Any:
    return inner.lower(jnp.int32(0)).compile()


def _under_a_nan_check(inner: Any) -> Any:
    def call(value: Any) -> None:
        with jax.debug_nans(True):
            inner(value)

    return call


def _behind_a_nan_check(inner: Any) -> Any:
    def call(value: Any) -> None:
        with jax.debug_nans(True):
            pass
        inner(value)

    return call


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "way",
    [lambda inner: inner, _fresh_jit, _ahead_of_time, _under_a_nan_check, _behind_a_nan_check],
    ids=["fast path", "slow path", "ahead of time", "under a NaN check", "behind a NaN check"],
)
def test_one_barrier_waits_for_the_taps_of_tap_functions_beside_threads_that_run_python(
    way: Any, rec: Recorder
) -> None:
    """The programs are compiled before, so that nothing but their dispatch tells of them."""

    def slow(value: Any) -> Any:
        rest = lax.fori_loop(0, 1000, lambda i, c: c @ c * 1e-3, jnp.ones((128, 128)) * value)
        return hcb.id_tap(rec, value, result=value + rest[0, 0].astype(jnp.int32))

    call = way(jax.jit(slow))
    call(jnp.int32(0))
    waits = threading.Event()

    def tap(value: Any) -> None:
        while waits.is_set() and not runtime.receivers()[0]._awaited:  # until the barrier waits for this tap
            pass
        call(value)

    program = jax.jit(lambda x: hcb.id_tap(tap, x))
    program(jnp.int32(1))
    hcb.barrier_wait()
    waits.set()
    ends = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(ends.is_set, True)])
    thread.start()
    try:
        for count in range(3, 8):
            program(jnp.int32(count))
            hcb.barrier_wait()
            assert len(rec) == count
    finally:
        ends.set()
        thread.join()


def test_a_barrier_waits_once_if_tap_functions_dispatch_nothing(
    monkeypatch: pytest.MonkeyPatch, rec: Recorder
) -> None:
    program = jax.jit(lambda x: hcb.id_tap(rec, x))
    program(1)
    hcb.barrier_wait()
    monkeypatch.setattr(inflight, "wait_for_tap_functions", None)
    for _ in range(20):
        program(1)
        hcb.barrier_wait()
    assert len(rec) == 21


def test_on_a_jax_that_does_not_tell_of_dispatches_a_barrier_waits_for_the_taps_of_tap_functions(
    monkeypatch: pytest.MonkeyPatch, rec: Recorder
) -> None:
    with monkeypatch.context() as lacking:
        lacking.delattr(dispatch._pxla, "ExecuteReplicated")
        with pytest.raises(LookupError, match=r"no pxla\.ExecuteReplicated"):
            compat.notice_dispatches(list)
    monkeypatch.setattr(inflight, "_are_noticed", False)
    inner = jax.jit(lambda x: hcb.id_tap(rec, x))
    program = jax.jit(lambda x: hcb.id_tap(lambda value: [inner(value), None][1], x))
    for count in range(1, 20):
        program(count)
        hcb.barrier_wait()
        assert len(rec) == count


def test_a_barrier_ends_though_each_tap_function_taps_again() -> None:
    count = [0]

    def again(value: Any) -> None:
        count[0] += 1
        if count[0] < 5_000:
            program(value)

    program = jax.jit(lambda x: hcb.id_tap(again, x))
    program(jnp.int32(0))
    hcb.barrier_wait(60)  # it does not wait for all of them
    count[0] = 5_000
    hcb.barrier_wait(60)
    assert runtime.receivers()[0].queued() == 0
