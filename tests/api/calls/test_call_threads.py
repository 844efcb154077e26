"""The thread that runs a host function, the work it waits for, and Ctrl-C meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.lifecycle import reentrant_calls
from hostcallback.receiver.errors import CallFailedError
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.taplog.reading.reader import LogReader
from threads import in_another_thread, in_threads, wait_for
from transforming import PROGRAM_FAILED


def here(x: Any) -> Any:
    return np.int32(threading.get_ident() % 2**31)


IDENT = jax.ShapeDtypeStruct((), np.int32)


def ident_of_this_thread() -> int:
    return threading.get_ident() % 2**31


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


def assert_books_are_closed() -> None:
    for receiver in runtime.receivers():
        assert not receiver.calls.running
        assert receiver.queued() == 0
        assert not any(receiver.scope._calls.values())
        assert native_library.load().hcb_call_count(receiver.source.device) == 0


def test_the_thread_that_dispatches_runs_it() -> None:
    f = jax.jit(lambda x: hcb.call(here, x, result_shape=IDENT))
    found: dict[int, int] = {}

    def dispatch() -> None:
        found[ident_of_this_thread()] = int(f(jnp.float32(1)))

    dispatch()
    in_another_thread(dispatch)
    assert len(found) == 2
    assert all(ident == ran for ident, ran in found.items())


def test_a_dispatch_returns_after_its_program_has_run() -> None:
    @jax.jit
    def f(x: Any) -> Any:  # of more than eight thunks: XLA does not take it for a cheap one
        y = jnp.sin(x) @ x
        z = hcb.call(lambda z: z, jnp.cos(y) @ x, result_shape=x)
        return jnp.sort(jnp.tanh(z) @ y, axis=0)

    x = jnp.ones((128, 128)).block_until_ready()
    assert all(f(x).is_ready() for _ in range(50))


def test_taps_before_it_have_been_delivered_when_it_begins() -> None:
    log: list[str] = []
    gate = threading.Event()

    def tap(x: Any) -> None:
        gate.wait(60)
        log.append("tap")

    def host(x: Any) -> Any:
        log.append("call")
        return x

    f = jax.jit(lambda x: hcb.call(host, hcb.id_tap(tap, x), result_shape=x))
    opening = threading.Timer(0.05, gate.set)
    opening.start()
    f(jnp.float32(1))
    gate.clear()
    opening = threading.Timer(0.05, gate.set)
    opening.start()
    f(jnp.float32(1))
    assert log == ["tap", "call"] * 2


def test_calls_and_taps_of_several_threads_at_a_time_keep_their_order() -> None:
    logs: dict[int, list[tuple[str, int]]] = {i: [] for i in range(4)}

    def step(c: Any, i: Any) -> Any:
        who, x = c
        hcb.id_tap(lambda v: logs[int(v[0])].append(("tap", int(v[1]))), (who, i))

        def host(v: Any) -> Any:
            logs[int(v[0])].append(("call", int(v[1])))
            return np.float32(v[2] + 1)

        return (who, hcb.call(host, (who, i, x), result_shape=x)), None

    f = jax.jit(lambda who: lax.scan(step, (who, jnp.float32(0)), jnp.arange(100))[0][1])
    f(jnp.int32(0))
    hcb.barrier_wait()
    logs[0].clear()
    in_threads(lambda i: f(jnp.int32(i)), len(logs))
    hcb.barrier_wait()
    assert all(log == [(what, i) for i in range(100) for what in ("tap", "call")] for log in logs.values())
    assert_books_are_closed()


def test_messages_keep_dense_numbers_and_calls_are_recorded(tmp_path: Path) -> None:
    def program(x: Any) -> Any:
        hcb.id_tap(lambda v: None, x)
        return hcb.call(lambda v: v + 1, x, result_shape=x)

    f = jax.jit(program)
    with hcb.outfeed_receiver(record=tmp_path) as receiver:
        for _ in range(10):
            f(jnp.float32(1))
    (row,) = [row for row in receiver.stats if row.delivered]
    assert (row.delivered, row.dropped, row.unrecorded, row.failed) == (20, 0, 0, 0)
    numbers = [logged.message.seq for logged in LogReader(tmp_path).messages()]
    assert numbers == list(range(numbers[0], numbers[0] + 20))


@pytest.mark.native_only
def test_a_tap_function_that_would_wait_for_itself_is_refused() -> None:
    inner = jax.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))
    inner(jnp.float32(1))
    errors: list[str] = []

    def tap(x: Any) -> None:
        try:
            inner(jnp.asarray(x)).block_until_ready()
        except PROGRAM_FAILED as error:
            errors.append(str(error))

    jax.jit(lambda x: hcb.id_tap(tap, x))(jnp.float32(1))
    hcb.barrier_wait()
    assert "a tap function runs a program with a call on its own device" in errors[0]
    assert float(inner(jnp.float32(1))) == 2
    assert_books_are_closed()


@pytest.mark.native_only
def test_a_barrier_does_not_wait_for_a_refused_call_that_it_has_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One of a hundred runs or so hung here until the device emitted something else.
    inner = jax.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))
    inner(jnp.float32(1)).block_until_ready()  # so that its call is emitted before the count below
    read_own_call = RingSource.read_own_call

    def read(source: RingSource, own: int, timeout_sec: float) -> Any:
        try:
            return read_own_call(source, own, timeout_sec)
        except CallFailedError:
            (receiver,) = [one for one in runtime.receivers() if one.source is source]
            wait_for(lambda: receiver._awaited, "a barrier")  # the frame of the call is withdrawn after that
            raise

    def tap(x: Any) -> None:
        with pytest.raises(PROGRAM_FAILED):
            inner(jnp.asarray(x)).block_until_ready()

    monkeypatch.setattr(RingSource, "read_own_call", read)
    emitting = runtime.receivers(["cpu:0"])[0].source.counters
    before = emitting().emitted
    jax.jit(lambda x: hcb.id_tap(tap, x))(jnp.float32(1))
    wait_for(lambda: emitting().emitted == before + 2, "the call of the tap function")
    # What a barrier does when the programs have ended.
    runtime.wait_delivered(deadline=time.perf_counter() + 30)
    hcb.barrier_wait()
    assert_books_are_closed()


def test_a_tap_function_may_run_a_program_with_a_call_on_another_device() -> None:
    inner = jax.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))
    found: list[float] = []

    def tap(x: Any) -> None:
        found.append(float(inner(jax.device_put(x, jax.devices()[1]))))

    f = jax.jit(lambda x: hcb.id_tap(tap, x))
    for _ in range(3):
        f(jnp.float32(1))
    hcb.barrier_wait()
    assert found == [2.0] * 3


def test_a_host_function_calls_its_own_program_again() -> None:
    def host(x: Any) -> Any:
        return x if x <= 0 else np.asarray(f(jnp.float32(x - 1))) + np.float32(1)

    f = jax.jit(lambda x: hcb.call(host, x, result_shape=x))
    assert float(f(jnp.float32(0))) == 0  # JAX allows no recursion before a first call is over
    assert float(f(jnp.float32(10))) == 10


def failing(f: Callable[[Any], Any], x: Any) -> bool:
    """Whether a call was interrupted: the program fails, and KeyboardInterrupt is raised as soon as possible."""
    try:
        try:
            f(x)
        except PROGRAM_FAILED as error:
            assert "KeyboardInterrupt" in str(error)
            until(lambda: False)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.native_only
def test_an_interrupted_host_function_interrupts_the_thread_that_dispatched() -> None:
    interrupt = False

    def host(x: Any) -> Any:
        if interrupt:
            signal.raise_signal(signal.SIGINT)
            until(lambda: False)
        return x

    f = jax.jit(lambda x: hcb.call(host, x, result_shape=x))
    f(jnp.float32(1))
    interrupt = True
    assert failing(f, jnp.float32(1))
    interrupt = False
    with pytest.raises(hcb.TapFunctionException, match="1 tap function call"):
        hcb.barrier_wait()
    assert float(f(jnp.float32(1))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_books_are_closed()


@pytest.mark.native_only
def test_a_call_that_waits_for_a_tap_can_be_interrupted() -> None:
    gate, entered = threading.Event(), threading.Event()
    called: list[float] = []

    def tap(x: Any) -> None:
        entered.set()
        gate.wait(60)

    def host(x: Any) -> Any:
        called.append(float(x))
        return x

    def program(x: Any) -> Any:
        return hcb.call(host, hcb.id_tap(tap, x), result_shape=x)

    f = jax.jit(program)
    gate.set()
    for size in (1, 1 << 16):  # the second size is outside the ring
        x = jnp.full(size, 1.0)
        g = jax.jit(lambda x: hcb.call(lambda v: host(v[0]) * v, hcb.id_tap(tap, x), result_shape=x))
        gate.set()
        g(x)
        gate.clear()
        entered.clear()
        called.clear()

        def interrupt() -> None:
            entered.wait(60)
            until(lambda: native_library.load().hcb_call_count(0) == 1)
            os.kill(os.getpid(), signal.SIGINT)

        with hcb.outfeed_receiver() as receiver:
            thread = threading.Thread(target=interrupt)
            thread.start()
            assert failing(g, x)
            thread.join()
            gate.set()
        assert called == []
        (row,) = [row for row in receiver.stats if row.delivered]
        assert (row.delivered, row.dropped) == (1, 1)
        assert_books_are_closed()
        assert float(g(x)[0]) == 1
    assert float(f(jnp.float32(3))) == 3


class Nested:
    """A call inside a callback of JAX, on the thread that dispatched, which a signal interrupts at one moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where = ""
        self.called = 0
        self.returns: Callable[[Any], Any] = lambda v: v
        self.f = jax.jit(lambda x: hcb.call(self._host, x, result_shape=x))
        call = reentrant_calls._call

        def around() -> None:
            self._at("before the function")
            call()
            self._at("after the function")

        monkeypatch.setattr(reentrant_calls, "_pool_threads", lambda: [1, self._at("counting")][0])
        monkeypatch.setattr(reentrant_calls, "_call", around)
        self.f(jnp.float32(1))
        self.called = 0

    def _at(self, moment: str) -> None:
        if moment == self.where:
            signal.raise_signal(signal.SIGINT)

    def _host(self, v: Any) -> Any:
        self.called += 1
        return self.returns(v)


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> Nested:
    return Nested(monkeypatch)


def fail(v: Any) -> Any:
    raise ValueError("as it should")


@pytest.mark.native_only
@pytest.mark.parametrize("where", ["counting", "before the function", "after the function"])
@pytest.mark.parametrize("returns", [lambda v: v, fail], ids=["returns", "raises"])
def test_an_interrupt_near_a_nested_host_function_is_not_lost(
    where: str, returns: Callable[[Any], Any], nested: Nested
) -> None:
    nested.where, nested.returns = where, returns
    assert failing(nested.f, jnp.float32(1))
    assert nested.called == (where == "after the function")
    assert reentrant_calls._running == 0
    with pytest.raises(hcb.TapFunctionException, match=r"KeyboardInterrupt|as it should"):
        hcb.barrier_wait()
    assert_books_are_closed()
    nested.where, nested.returns = "", lambda v: v
    assert float(nested.f(jnp.float32(1))) == 1


@pytest.mark.native_only
@pytest.mark.parametrize("where", ["before the function", "after the function"])
def test_a_handler_of_the_user_is_called_near_a_nested_host_function_and_the_program_goes_on(
    where: str, nested: Nested
) -> None:
    asked: list[int] = []
    nested.where = where
    usual = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        assert float(nested.f(jnp.float32(1))) == 1
        assert asked == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, usual)
    hcb.barrier_wait()


@pytest.mark.native_only
def test_a_handler_of_the_user_is_called_wherever_a_signal_comes_and_the_program_goes_on() -> None:
    length, seen, asked = 3000, [0], []
    due = iter(range(0, length, 100))

    def host(v: Any) -> Any:
        seen[0] += 1
        return v + 1

    def send() -> None:
        for number in due:
            until(lambda: seen[0] > number)  # noqa: B023
            os.kill(os.getpid(), signal.SIGINT)

    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.call(host, c, result_shape=c), None), x, None, length)[0]
    )
    usual = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert float(f(jnp.float32(0))) == length
    finally:
        sender.join()
        signal.signal(signal.SIGINT, usual)
    assert asked  # signals of which the last was not handled yet count once
    hcb.barrier_wait()


@pytest.mark.native_only
def test_a_handler_that_a_host_function_installs_stays(nested: Nested) -> None:
    usual = signal.getsignal(signal.SIGINT)

    def mine(number: int, frame: Any) -> None:
        pass

    def install(v: Any) -> Any:
        signal.signal(signal.SIGINT, mine)
        return v

    nested.returns = install
    try:
        nested.f(jnp.float32(1))
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.native_only
def test_interrupts_at_any_time_leave_the_books_in_order() -> None:
    calls = 0  # not an event: `count` may be interrupted while it holds the event's lock

    def count(c: Any) -> Any:
        nonlocal calls
        calls += 1
        return c + 1

    def interrupt(after_sec: float) -> None:
        before = calls
        go.set()
        until(lambda: calls > before)
        threading.Event().wait(after_sec)
        os.kill(os.getpid(), signal.SIGINT)

    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.call(count, c, result_shape=c), None), x, None, 10**7)[0]
    )
    g = jax.jit(lambda x: hcb.call(lambda v: v, hcb.id_tap(lambda v: None, x), result_shape=x))
    g(jnp.float32(1))
    for i in range(30):
        go = threading.Event()
        timer = threading.Thread(target=interrupt, args=[0.0007 * i])
        timer.start()
        go.wait()
        assert failing(f, jnp.float32(0))
        timer.join()
        try:
            hcb.barrier_wait()
        except hcb.TapFunctionException as error:
            assert "KeyboardInterrupt" in str(error.exceptions[0])
        assert_books_are_closed()
        assert float(g(jnp.float32(i))) == i
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
