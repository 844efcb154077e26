"""`barrier_wait` returns when every tap dispatched before it, from any thread, has been delivered."""

from __future__ import annotations

import gc
import threading
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback import inflight
from receiver.runtime import runtime
from recorder import Recorder

JITS = [pytest.param(jax.jit, id="jax.jit"), pytest.param(hcb.jit, id="hcb.jit")]


def slow_program(rec: Any, steps: int) -> Any:
    """A computation that runs for a while and taps at its very end."""

    def f(x: Any) -> Any:
        x = lax.fori_loop(0, steps, lambda i, c: c @ c * 1e-3, x)
        return hcb.id_tap(rec, x[0, 0])

    return f


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("keeps_result", [True, False])
def test_barrier_waits_for_computations_that_other_threads_dispatched(jit: Any, keeps_result: bool) -> None:
    rec = Recorder()
    f = jit(slow_program(rec, 300))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)  # compiled
    hcb.barrier_wait()
    kept: list[Any] = []

    def dispatch() -> None:
        for _ in range(3):
            out = f(x)
            if keeps_result:
                kept.append(out)

    threads = [threading.Thread(target=dispatch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hcb.barrier_wait()
    assert len(rec) == 1 + 9


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("result", ["nothing", "large", "input", "structure", "donated"])
def test_barrier_waits_whatever_the_computation_returns(jit: Any, result: str) -> None:
    rec = Recorder()
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

    g = jit(f, **({"donate_argnums": 0} if result == "donated" else {}))
    count = 0

    def dispatch() -> None:
        nonlocal count
        for _ in range(3):
            g(jnp.ones((128, 128)) * 1e-2)
            count += 1

    dispatch()
    hcb.barrier_wait()
    assert len(rec) == count
    thread = threading.Thread(target=dispatch)
    thread.start()
    thread.join()
    hcb.barrier_wait()
    assert len(rec) == count


def test_a_function_with_several_signatures_is_waited_for_under_each() -> None:
    rec = Recorder()

    @hcb.jit
    def f(x: Any) -> Any:
        y = slow_program(rec, 100)(x)
        return (y,) if x.dtype == jnp.float32 else {"y": [y, x]}

    for dtype in (jnp.float32, jnp.float16, jnp.float32, jnp.bfloat16):
        f(jnp.ones((64, 64), dtype))
    hcb.barrier_wait()
    assert len(rec) == 4


@pytest.mark.native_only  # a computation with Python callbacks is over when its call returns
@pytest.mark.parametrize("jit", JITS)
def test_barrier_reports_a_computation_that_outlasts_the_limit(jit: Any) -> None:
    # With a call in the process, dispatching looks at what the last computation left, and must not wait for it.
    jit(lambda x: hcb.call(lambda v: v, x, result_shape=x))(1.0)
    rec = Recorder()
    f = jit(slow_program(rec, 20_000))
    for _ in range(2):
        f(jnp.ones((128, 128)) * 1e-2)
    with pytest.raises(hcb.TapTimeoutError, match=r"still running when the time was up.*timeout_sec="):
        hcb.barrier_wait(timeout_sec=0.05)
    hcb.barrier_wait()
    assert len(rec) == 2


def test_barrier_reports_a_slow_tap_by_name_and_what_is_queued() -> None:
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


def test_taps_of_a_program_dropped_while_it_runs_are_delivered() -> None:
    rec = Recorder()
    for _ in range(20):
        hcb.jit(slow_program(rec, 50))(jnp.ones((64, 64)) * 1e-2)
        jax.jit(slow_program(rec, 50))(jnp.ones((64, 64)) * 1e-2)
    gc.collect()
    hcb.barrier_wait()
    assert len(rec) == 40


def test_a_failing_computation_does_not_hang_the_barrier() -> None:
    rec = Recorder()

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


def test_barrier_waits_for_a_computation_whose_result_was_donated_to_an_untapped_program() -> None:
    rec = Recorder()
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

    thread = threading.Thread(target=dispatch)
    thread.start()
    thread.join()
    hcb.barrier_wait()
    assert len(rec) == 4


def test_a_barrier_does_not_wait_for_what_was_emitted_after_it() -> None:
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
    while not receiver._waiters:  # it has taken stock of what was emitted
        pass
    for i in range(2, 50):
        f(i)
    gate.set()
    assert reached.wait(30)
    waiter.join(30)
    over = not waiter.is_alive()
    with pytest.raises(
        hcb.TapTimeoutError, match=r"4[78] message\(s\)"
    ):  # the one that runs, and those behind it
        hcb.barrier_wait(timeout_sec=0.2)
    go_on.set()
    hcb.barrier_wait()
    assert over
    assert seen == list(range(50))


@pytest.mark.parametrize("timeout_sec", ["soon", -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_sec: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_sec is .*expected a number of seconds"):
        hcb.barrier_wait(timeout_sec)


@pytest.mark.parametrize("jit", JITS)
def test_threads_that_end_leave_nothing_behind(jit: Any) -> None:
    f = jit(lambda x: hcb.id_tap(lambda v: None, x))

    def run() -> None:
        f(1.0).block_until_ready()

    def kept_after_another_thread() -> int:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return len(inflight._tokens) + len(inflight._results)

    for _ in range(50):
        kept_after_another_thread()
    deadline = monotonic() + 60
    # XLA may take a while to say that a token is ready whose computation's result is.
    while kept_after_another_thread() >= 20:
        assert monotonic() < deadline
    hcb.barrier_wait()


def test_pruning_keeps_one_donated_result_for_the_barrier_to_know() -> None:
    # A result that was donated says that something else may still run on its account: see `_pending`.
    results: dict[int, Any] = {}
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    kept = []
    for key in range(1, 400):
        results[key] = jnp.zeros(4) + key
        if key % 100 == 0:
            kept.append(donate(results[key]))
        results[key].is_deleted() or results[key].block_until_ready()
    inflight.prune(results)
    assert list(results) == [inflight.DONATED]
    assert results[inflight.DONATED].is_deleted()
    results[1] = jnp.zeros(4).block_until_ready()  # later results take no notice of it
    inflight.prune(results)
    assert list(results) == [inflight.DONATED]
