"""A busy receiver leaves the interpreter lock to other threads that want it, and Python's settings as they were."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.device_receiver import FEW, DeviceReceiver
from hostcallback.receiver.runtime.dispatch import gil_share as lock_share
from hostcallback.receiver.runtime.dispatch.gil_share import INTERVAL_SEC, GilThrottle
from hostcallback.receiver.runtime.runtime import runtime
from threads import wait_for

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


def no_receiver_delivers() -> None:
    # A receiver reports that every message is delivered shortly before its thread goes idle.
    deadline = time.monotonic() + 10
    while lock_share._delivering:
        assert time.monotonic() < deadline


def tapped(tap: Any, steps: int) -> Any:
    return hcb.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(tap, c) + 1, None), x, None, length=steps)[0])


@pytest.mark.skipif(not native.available(), reason="without the native library receivers never pause")
def test_a_receiver_that_others_contend_with_leaves_them_most_of_the_time() -> None:
    # The thread computes without the lock for a while in each call, as a dispatch does.
    receiver: list[int] = []
    began = threading.Event()

    def tap(value: Any) -> None:
        receiver[:] = [threading.get_ident()]
        began.set()
        busy_for(20e-6)

    program = tapped(tap, 30_000)
    program(jnp.float32(0)).block_until_ready()
    assert began.wait(60)
    data, shares = bytes(50_000), []
    for _ in range(5):
        clock = time.pthread_getcpuclockid(receiver[0])
        begin, used = time.perf_counter(), time.clock_gettime(clock)
        while time.perf_counter() - begin < 0.05:
            hashlib.sha256(data)
        shares.append((time.clock_gettime(clock) - used) / (time.perf_counter() - begin))
    hcb.barrier_wait()
    assert statistics.median(shares) < 0.6, shares


@pytest.mark.native_only
def test_a_receiver_no_longer_pauses_for_a_thread_that_waits_for_it() -> None:
    share = GilThrottle()
    with share:
        share.contended = lock_share.ALONE_AFTER
        assert share.yield_gil() >= lock_share.PAUSE_NS * 1e-9
        assert share.contended >= lock_share.ALONE_AFTER - 1
        threading.Event().wait(1e-4)  # a wait that is seen before the other thread begins to wait
        share.forget()
        share.yield_gil()
        assert share.contended == 0
        share.contended = lock_share.ALONE_AFTER
        assert share.yield_gil() >= lock_share.PAUSE_NS * 1e-9  # it forgets once


def test_a_barrier_makes_its_receivers_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forgot: list[GilThrottle] = []
    monkeypatch.setattr(GilThrottle, "forget", lambda self: forgot.append(self))
    jax.jit(lambda x: hcb.id_tap(lambda value: None, x))(jnp.float32(0)).block_until_ready()
    hcb.barrier_wait()
    assert {receiver._share for receiver in runtime.receivers()} == set(forgot)


@pytest.mark.skipif(not native.available(), reason="without the native library receivers never pause")
def test_a_tap_that_sleeps_is_not_taken_for_contention() -> None:
    share = GilThrottle()

    def pauses() -> list[float]:
        for _ in range(20):
            share.yield_gil()  # after any earlier state
        found = []
        for _ in range(50):
            threading.Event().wait(1e-4)
            found.append(share.yield_gil())
        return found

    # Long pauses are 0.5 ms. Threads of other tests, and other programs on a busy machine, may interfere now and then;
    # a pause that is taken for contention by mistake is so each time.
    medians: list[float] = []
    with share:
        while not medians or (medians[-1] >= 0.4e-3 and len(medians) < 50):
            medians.append(statistics.median(pauses()))
    assert medians[-1] < 0.4e-3, medians


def test_the_switch_interval_is_short_while_a_receiver_delivers_and_as_before_afterwards() -> None:
    seen: list[float] = []
    program = tapped(lambda value: seen.append(sys.getswitchinterval()), 10_000)
    program(jnp.float32(0))
    hcb.barrier_wait()
    assert min(seen) == pytest.approx(INTERVAL_SEC, abs=1.1e-6)
    no_receiver_delivers()
    assert sys.getswitchinterval() == DEFAULT


@pytest.mark.parametrize("interval", [10e-6, 100e-6, 1e-3])
def test_an_interval_that_the_user_sets_meanwhile_stays(interval: float) -> None:
    found: list[float] = []

    def tap(value: Any) -> None:
        # Any one message may come in a batch so small that it is delivered without a change.
        if not found and sys.getswitchinterval() == pytest.approx(INTERVAL_SEC, abs=1.1e-6):
            found.append(value)
            sys.setswitchinterval(interval)

    tapped(tap, 5_000)(jnp.float32(0))
    hcb.barrier_wait()
    no_receiver_delivers()
    assert found
    assert sys.getswitchinterval() == pytest.approx(interval, abs=1.1e-6)


def test_a_value_saved_while_a_receiver_delivered_does_not_stay_for_good() -> None:
    saved: list[float] = []
    program = tapped(lambda value: saved.append(sys.getswitchinterval()), 5_000)
    program(jnp.float32(0))
    hcb.barrier_wait()
    no_receiver_delivers()
    # The last messages may come in a batch so small that it is delivered without a change.
    assert min(saved) == pytest.approx(INTERVAL_SEC, abs=1.1e-6)
    sys.setswitchinterval(min(saved))
    program(jnp.float32(0))
    hcb.barrier_wait()
    no_receiver_delivers()
    assert sys.getswitchinterval() == pytest.approx(DEFAULT)


def test_a_shorter_interval_is_left_alone() -> None:
    sys.setswitchinterval(20e-6)
    seen: list[float] = []
    program = tapped(lambda value: seen.append(sys.getswitchinterval()), 2_000)
    program(jnp.float32(0))
    hcb.barrier_wait()
    assert seen == pytest.approx([20e-6] * 2_000)
    no_receiver_delivers()
    assert sys.getswitchinterval() == pytest.approx(20e-6)


def deliver(share: GilThrottle, work: Any, in_turn: bool = False) -> bool:
    """Calls a function for 100 messages; returns whether the receiver then wants the turn."""
    share.in_turn = in_turn
    with share:
        share.begin_messages()
        for _ in range(100):
            work()
        share.messages = 100
    return share.wants_turn


def deliveries_until_it_wants_the_turn(share: GilThrottle) -> int:
    return next(count for count in itertools.count() if deliver(share, lambda: None))


@pytest.mark.native_only
def test_a_receiver_whose_functions_take_long_wants_no_turn() -> None:
    share = GilThrottle()
    assert not share.wants_turn  # nothing is known yet
    assert deliver(share, lambda: None)
    assert not deliver(share, lambda: busy_for(20e-6))
    assert 0 < deliveries_until_it_wants_the_turn(share) < 40


@pytest.mark.native_only
def test_a_receiver_whose_functions_wait_now_and_then_wants_no_turn_for_a_while() -> None:
    share, turns = GilThrottle(), itertools.count()

    def work() -> None:
        if next(turns) % 20 == 0:
            threading.Event().wait(2e-3)

    assert deliver(share, lambda: None)
    assert deliver(share, work)  # without the turn, such waits may be for the interpreter lock
    assert not deliver(share, work, in_turn=True)
    assert deliveries_until_it_wants_the_turn(share) == lock_share.WITHOUT_TURN - 2


@pytest.fixture
def four_receivers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function with 300 messages of each of four devices, whose receivers take turns before."""
    monkeypatch.setattr(lock_share, "LIGHT_SEC", 1e-4)  # a busy machine may be twenty times slower
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    told: list[Any] = [lambda device: None]

    def steps(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return hcb.id_tap(lambda value, *, device: told[0](device.id), carry) + 1, None

        return lax.scan(step, x, None, length=300)[0]

    program = hcb.jit(jax.shard_map(steps, mesh=mesh, in_specs=spec, out_specs=spec))

    def run(function: Any) -> None:
        told[0] = function
        program(jnp.zeros(4))
        hcb.barrier_wait(timeout_sec=60)

    def becomes_light() -> bool:
        for receiver in receivers():
            receiver._share._without_turn = 0  # on a busy machine it may have waited
        run(lambda device: None)
        return all(receiver._share.wants_turn for receiver in receivers())

    wait_for(becomes_light, "the turns of all receivers")
    return run


def receivers() -> list[DeviceReceiver]:
    return runtime.receivers([f"cpu:{device}" for device in range(4)])


@pytest.mark.native_only
def test_receivers_take_turns_until_their_functions_wait_or_a_recorder_writes(
    four_receivers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, int] = {}
    for receiver in receivers():

        def listen(
            timeout_sec: Any, turn_from: int, read: Any = receiver.source.read, name: str = receiver.name
        ) -> Any:
            asked[name] = turn_from
            return read(timeout_sec, turn_from)

        monkeypatch.setattr(receiver.source, "read", listen)

    def asks_for(turn_from: int, function: Any) -> bool:
        four_receivers(function)
        return len(asked) == 4 and set(asked.values()) == {turn_from}

    wait_for(lambda: asks_for(FEW, lambda device: None))
    wait_for(lambda: asks_for(0, lambda device: threading.Event().wait(2e-4)))
    wait_for(lambda: asks_for(FEW, lambda device: None))
    with hcb.outfeed_receiver(record=tmp_path):
        wait_for(lambda: asks_for(0, lambda device: None))


@pytest.mark.native_only
def test_receivers_deliver_while_the_function_of_another_blocks(four_receivers: Any) -> None:
    seen: list[int] = []
    others_are_done = threading.Event()

    def tap(device: int) -> None:
        seen.append(device)
        if device == 0 and seen.count(0) == 1:
            assert others_are_done.wait(30)
        if len(seen) - seen.count(0) == 3 * 300:
            others_are_done.set()

    four_receivers(tap)
    assert len(seen) == 4 * 300


@pytest.mark.native_only
def test_functions_that_release_the_lock_run_beside_those_of_other_devices(four_receivers: Any) -> None:
    inside: list[float] = []

    def tap(device: int) -> None:
        begin = time.perf_counter()
        threading.Event().wait(1e-3)
        inside.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    four_receivers(tap)
    assert sum(inside) > 1.5 * (time.perf_counter() - begin)
