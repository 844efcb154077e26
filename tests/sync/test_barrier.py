"""`barrier_wait` returns when every tap dispatched before it, from any thread, has been delivered."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from recorder import Recorder
from threads import in_another_thread, in_threads


def slow_program(rec: Any, steps: int) -> Any:
    """A computation that runs for a while and taps at its very end."""

    def f(x: Any) -> Any:
        x = lax.fori_loop(0, steps, lambda i, c: c @ c * 1e-3, x)
        return hcb.id_tap(rec, x[0, 0])

    return f


@pytest.mark.parametrize("keeps_result", [True, False])
def test_barrier_waits_for_computations_that_other_threads_dispatched(
    keeps_result: bool, rec: Recorder
) -> None:
    f = jax.jit(slow_program(rec, 300))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)  # compiled
    hcb.barrier_wait()
    kept: list[Any] = []

    def dispatch(_: int) -> None:
        for _ in range(3):
            out = f(x)
            if keeps_result:
                kept.append(out)

    in_threads(dispatch, 3)
    hcb.barrier_wait()
    assert len(rec) == 1 + 9


@pytest.mark.parametrize("result", ["nothing", "large", "input", "structure", "donated"])
def test_barrier_waits_whatever_the_computation_returns(result: str, rec: Recorder) -> None:
    inner = slow_program(rec, 200)

    def f(x: Any) -> Any:
        y = inner(x)
        return {
            "nothing": lambda: None,
            "large": lambda: jnp.zeros((256, 256)) + y,
            "input": lambda: x,
            "structure": lambda: {"a": [x, (y, x + 1)]},
            "donated": lambda: x + y,
        }[result]()

    g = jax.jit(f, **({"donate_argnums": 0} if result == "donated" else {}))
    count = 0

    def dispatch() -> None:
        nonlocal count
        for _ in range(3):
            g(jnp.ones((128, 128)) * 1e-2)
            count += 1

    dispatch()
    hcb.barrier_wait()
    assert len(rec) == count
    in_another_thread(dispatch)
    hcb.barrier_wait()
    assert len(rec) == count


def test_a_function_with_several_signatures_is_waited_for_under_each(rec: Recorder) -> None:
    @hcb.jit
    def f(x: Any) -> Any:
        y = slow_program(rec, 100)(x)
        return (y,) if x.dtype == jnp.float32 else {"y": [y, x]}

    for dtype in (jnp.float32, jnp.float16, jnp.float32, jnp.bfloat16):
        f(jnp.ones((64, 64), dtype))
    hcb.barrier_wait()
    assert len(rec) == 4


@pytest.mark.slow
@pytest.mark.native_only  # a computation with Python callbacks is over when its call returns
def test_barrier_reports_a_computation_that_outlasts_the_limit(rec: Recorder) -> None:
    # With a call in the process, dispatch inspects the results of the last computation, and must not wait for them.
    jax.jit(lambda x: hcb.call(lambda v: v, x, result_shape=x))(1.0)
    f = jax.jit(slow_program(rec, 20_000))
    for _ in range(2):
        f(jnp.ones((128, 128)) * 1e-2)
    with pytest.raises(hcb.TapTimeoutError, match=r"still running when the time was up.*timeout_sec="):
        hcb.barrier_wait(timeout_sec=0.05)
    hcb.barrier_wait()
    assert len(rec) == 2


def test_barrier_reports_a_slow_tap_by_name_and_its_queued_messages() -> None:
    release = threading.Event()
    seen: list[int] = []

    def slow_tap(x: Any) -> None:
        release.wait()
        seen.append(int(x))

    f = hcb.jit(lambda x: hcb.id_tap(slow_tap, x))
    for i in range(5):
        f(i)
    with pytest.raises(hcb.TapTimeoutError) as info:
        hcb.barrier_wait(timeout_sec=0.2)
    text = str(info.value)
    assert "slow_tap" in text
    assert "test_barrier.py" in text
    assert "message(s)" in text
    assert "timeout_sec=" in text
    release.set()
    hcb.barrier_wait()
    assert seen == [0, 1, 2, 3, 4]


def test_a_tap_function_may_call_jax_and_tap_itself() -> None:
    inner = Recorder()

    def tap(x: Any) -> None:
        big = jnp.ones((300, 300)) * x
        hcb.jit(lambda b: hcb.id_tap(inner, (b @ b)[0, 0]))(big).block_until_ready()

    f = hcb.jit(lambda x: hcb.id_tap(tap, x))
    for i in range(3):
        f(float(i))
    hcb.barrier_wait()
    hcb.barrier_wait()  # the inner taps were emitted while the first barrier waited
    assert inner.floats() == [0.0, 300.0, 1200.0]


def test_waiting_inside_a_tap_function_is_refused() -> None:
    def tap(x: Any) -> None:
        hcb.barrier_wait()

    hcb.jit(lambda x: hcb.id_tap(tap, x))(1.0)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert isinstance(info.value.exceptions[0], hcb.ReentrantWaitError)


@pytest.mark.slow
def test_taps_of_a_program_dropped_while_it_runs_are_delivered(rec: Recorder) -> None:
    for _ in range(20):
        hcb.jit(slow_program(rec, 50))(jnp.ones((64, 64)) * 1e-2)
        jax.jit(slow_program(rec, 50))(jnp.ones((64, 64)) * 1e-2)
    gc.collect()
    hcb.barrier_wait()
    assert len(rec) == 40


def test_a_failing_computation_does_not_hang_the_barrier(rec: Recorder) -> None:
    def bad_callback(x: Any) -> Any:
        raise ValueError("on purpose")

    def f(x: Any) -> Any:
        y = jax.pure_callback(bad_callback, jax.ShapeDtypeStruct((), jnp.float32), x)
        return hcb.id_tap(rec, y + 1)

    out = None
    try:
        out = hcb.jit(f)(1.0)
        out.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "on purpose" in str(error)
    else:
        pytest.fail("the computation was expected to fail")
    hcb.barrier_wait(timeout_sec=30)
    assert len(rec) == 0


def test_barrier_waits_for_a_computation_whose_result_was_donated_to_an_untapped_program(
    rec: Recorder,
) -> None:
    inner = slow_program(rec, 400)
    f = hcb.jit(inner)
    follow = jax.jit(lambda y: y + 1, donate_argnums=0)
    x = jnp.ones((128, 128)) * 1e-2
    follow(f(x))
    hcb.barrier_wait()
    kept = []

    def dispatch() -> None:
        for _ in range(3):
            kept.append(follow(f(x)))

    in_another_thread(dispatch)
    hcb.barrier_wait()
    assert len(rec) == 4


def test_a_barrier_does_not_wait_for_later_messages() -> None:
    seen: list[int] = []
    reached = threading.Event()
    go_on = threading.Event()

    def tap(x: Any) -> None:
        seen.append(int(x))
        if x == 2:
            reached.set()
            go_on.wait()

    f = hcb.jit(lambda x: hcb.id_tap(tap, x))
    gate = threading.Event()
    hcb.jit(lambda x: hcb.id_tap(lambda v: gate.wait(), x))(0)
    f(0)
    f(1).block_until_ready()
    waiter = threading.Thread(target=hcb.barrier_wait)
    waiter.start()
    receiver = runtime.receivers(["cpu:0"])[0]
    while not receiver._awaited:  # until it has noted the last emitted message
        pass
    for i in range(2, 50):
        f(i)
    gate.set()
    assert reached.wait(30)
    waiter.join(30)
    over = not waiter.is_alive()
    with pytest.raises(
        hcb.TapTimeoutError, match=r"4[78] message\(s\)"
    ):  # the running one, and the ones queued behind it
        hcb.barrier_wait(timeout_sec=0.2)
    go_on.set()
    hcb.barrier_wait()
    assert over
    assert seen == list(range(50))


@pytest.mark.parametrize("timeout_sec", ["soon", -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_sec: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_sec is .*expected a number of seconds"):
        hcb.barrier_wait(timeout_sec)


def test_barrier_waits_for_programs_that_have_not_begun_and_left_no_result(rec: Recorder) -> None:
    # Untapped programs take all of XLA's threads, and one of them computes the tapped program's input.
    busy = jax.jit(lambda x: lax.fori_loop(0, 400, lambda i, c: c @ c * 1e-3, x))
    tapped = jax.jit(lambda x: (hcb.id_tap(rec, x[0, 0]), None)[1])
    x = jnp.ones((128, 128)) * 1e-2
    tapped(busy(x))
    hcb.barrier_wait()
    for round in range(5):
        for _ in range(4):
            in_another_thread(lambda: busy(x))
        in_another_thread(lambda: tapped(busy(x)))
        hcb.barrier_wait()
        assert len(rec) == 2 + round


@pytest.mark.parametrize("way", ["shard_map", "pmap", "each device", "sharded by the compiler"])
def test_barrier_waits_for_several_devices(way: str, rec: Recorder) -> None:
    f = slow_program(rec, 100)
    devices = jax.devices()
    mesh = jax.sharding.Mesh(devices, ("i",))
    spec = jax.sharding.PartitionSpec("i")
    x = jnp.ones((len(devices), 64, 64)) * 1e-2

    def on_each(x: Any) -> Any:
        return f(x[0])[None]

    if way == "shard_map":
        call = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=spec, out_specs=spec))
    elif way == "pmap":
        call = jax.pmap(f)
    elif way == "each device":
        one = jax.jit(f)
        call = lambda x: [one(jax.device_put(row, device)) for row, device in zip(x, devices, strict=True)]  # noqa: E731
    else:
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        call = jax.jit(jax.vmap(f))
    call(x)
    hcb.barrier_wait()
    once = len(rec)
    assert once == (1 if way == "sharded by the compiler" else len(devices))
    for _ in range(3):
        call(x)
    hcb.barrier_wait()
    assert len(rec) == 4 * once
    in_another_thread(lambda: ([call(x) for _ in range(3)], None)[1])
    hcb.barrier_wait()
    assert len(rec) == 7 * once


def test_barrier_waits_behind_a_tap_function_that_needs_the_device() -> None:
    # Its program waits for room in the queue, and the tap function for a slot on the device: a fence takes no slot.
    big = jnp.ones(200_000)
    seen: list[float] = []

    def tap(x: Any) -> None:
        (jnp.sum(jnp.ones((64, 64)) @ jnp.ones((64, 64))) * x[0]).block_until_ready()
        seen.append(float(x[0]))

    f = jax.jit(lambda x: lax.scan(lambda c, i: (hcb.id_tap(tap, c), None), x, length=60)[0])
    in_another_thread(lambda: (f(big), None)[1])
    hcb.barrier_wait()
    assert len(seen) == 60


def test_barrier_returns_while_another_thread_goes_on_dispatching(rec: Recorder) -> None:
    stop = threading.Event()
    busy = jax.jit(lambda x: lax.fori_loop(0, 50, lambda i, c: c @ c * 1e-3, x))
    x = jnp.ones((64, 64)) * 1e-2

    def go_on() -> None:
        y = x
        while not stop.is_set():
            y = busy(y)

    f = jax.jit(lambda x: hcb.id_tap(rec, x))
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for i in range(10):
            f(1.0)
            hcb.barrier_wait(timeout_sec=60)
            assert len(rec) == i + 1
    finally:
        stop.set()
        thread.join()


def test_several_threads_wait_at_once(rec: Recorder) -> None:
    f = jax.jit(slow_program(rec, 20))
    x = jnp.ones((64, 64)) * 1e-2
    short: list[int] = []
    made = threading.Lock()
    calls = 0

    def work(_: int) -> None:
        nonlocal calls
        for _ in range(20):
            f(x)
            with made:
                calls += 1
                so_far = calls
            hcb.barrier_wait()
            if len(rec) < so_far:
                short.append(so_far)

    in_threads(work, 4)
    assert not short
    assert len(rec) == 80


def test_a_barrier_that_gave_up_leaves_the_device_to_others(rec: Recorder) -> None:
    release = threading.Event()

    def hold(x: Any) -> None:
        release.wait()

    stuck = jax.jit(lambda x: hcb.id_tap(hold, x))
    stuck(1.0)
    with pytest.raises(hcb.TapTimeoutError):
        hcb.barrier_wait(timeout_sec=0.05)
    work = jax.jit(lambda x: lax.fori_loop(0, 50, lambda i, c: c @ c * 1e-3, x))
    for _ in range(100):  # more than a device has places
        work(jnp.ones((64, 64))).block_until_ready()
    release.set()
    hcb.barrier_wait()
    jax.jit(lambda x: hcb.id_tap(rec, x))(1.0)
    hcb.barrier_wait()
    assert len(rec) == 1


def test_jaxs_barrier_waits_for_taps_and_raises_their_errors(rec: Recorder) -> None:
    f = jax.jit(slow_program(rec, 200))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    in_another_thread(lambda: (f(x), None)[1])
    jax.effects_barrier()
    assert len(rec) == 2

    def bad(v: Any) -> None:
        raise KeyError("on purpose")

    jax.jit(lambda x: hcb.id_tap(bad, x))(1.0)
    with pytest.raises(hcb.TapFunctionException):
        jax.effects_barrier()
    jax.effects_barrier()


def test_jaxs_barrier_in_a_tap_function_waits_for_jax_alone() -> None:
    seen: list[int] = []

    def tap(x: Any) -> None:
        jax.effects_barrier()
        seen.append(int(x))

    f = jax.jit(lambda x: hcb.id_tap(tap, x))
    f(1)
    f(2)
    hcb.barrier_wait()
    assert seen == [1, 2]
