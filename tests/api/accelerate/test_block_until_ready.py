"""What waits for a result waits for accelerated callbacks and prints; programs rely on that before they close files."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback._jax_compat import sync
from hostcallback.api import accelerate
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.sources.settled import settled

X = np.float32(3)
WAIT_SEC = 60.0

WAYS: dict[str, Callable[[Any], Any]] = {
    "one": jax.block_until_ready,
    "several": lambda x: jax.block_until_ready({"a": x, "b": [x + 1]}),
    "method": lambda x: x.block_until_ready(),
    "float": float,
    "bool": bool,
    "int": int,
    "complex": complex,
    "str": str,
    "print": lambda x: print(x, file=io.StringIO()),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "device_get": jax.device_get,
    "device_get of several": lambda x: jax.device_get([x, x + 1]),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "__array__": lambda x: x.__array__(),
    "memoryview": memoryview,
    "a function of numpy": lambda x: np.add(x, 1),
    "dlpack": np.from_dlpack,
}


class Held:
    """A callback that waits until `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.order: list[str] = []

    def __call__(self, value: Any) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_SEC)
        self.order.append("called")


@pytest.mark.parametrize("way", WAYS)
def test_it_returns_after_the_callbacks(way: str) -> None:
    held = Held()
    with hcb.accelerate():
        f = jax.jit(lambda x: [jax.debug.callback(held, x), x][1])

        def block() -> None:
            WAYS[way](f(X))
            held.order.append("ready")

        thread = threading.Thread(target=block)
        thread.start()
        assert held.begun.wait(WAIT_SEC)
        held.go.set()
        thread.join(WAIT_SEC)
    assert held.order == ["called", "ready"]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_python_closes_thereafter_is_complete(way: str) -> None:
    with hcb.accelerate():

        def step(c: Any, i: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return c + i, None

        f = jax.jit(lambda x: lax.scan(step, x, np.arange(300))[0])
        for _ in range(20):
            seen: list[int] = []
            WAYS[way](f(X))
            assert len(seen) == 300


def test_an_io_callback_without_results_is_waited_for() -> None:
    seen: list[Any] = []
    with hcb.accelerate():
        for count in range(1, 20):
            jax.block_until_ready(
                jax.jit(lambda x: [jax.experimental.io_callback(seen.append, None, x), x][1])(X)
            )
            assert len(seen) == count


@pytest.mark.parametrize("way", WAYS)
def test_prints_are_waited_for(way: str) -> None:
    def body(i: Any, x: Any) -> Any:
        jax.debug.print("at {}", i)
        return x + 1

    with hcb.accelerate():
        f = jax.jit(lambda x: lax.fori_loop(0, 200, body, x))
        for _ in range(10):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                WAYS[way](f(X))
            assert printed.getvalue() == "".join(f"at {i}\n" for i in range(200))


def test_a_sharded_result_is_waited_for() -> None:
    seen: list[Any] = []
    mesh = jax.make_mesh((2,), ("x",))
    sharded = jax.device_put(np.arange(4.0), jax.NamedSharding(mesh, jax.P("x")))
    with hcb.accelerate():
        f = jax.jit(lambda x: [jax.debug.callback(seen.append, x.sum()), x + 1][1])
        for count in range(1, 20):
            np.asarray(f(sharded))
            assert len(seen) == count


def test_once_all_is_delivered_a_wait_does_not_look_at_the_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    with hcb.accelerate():
        ready = jax.jit(lambda x: [jax.debug.print("{}", x), x][1])(X)
        ready.block_until_ready()
        monkeypatch.setattr(accelerate.runtime, "receivers", None)
        for wait in WAYS.values():
            wait(ready)


@pytest.mark.native_only  # on the callback transport only what waits for a result waits
def test_a_call_returns_after_the_output_as_jaxs_does() -> None:
    def body(i: Any, x: Any) -> Any:
        jax.debug.print("at {}", i)
        return x @ x

    with hcb.accelerate():
        f = jax.jit(lambda x: lax.fori_loop(0, 100, body, x))
        x = np.zeros((100, 100), np.float32)
        for _ in range(10):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                f(x)
            assert printed.getvalue() == "".join(f"at {i}\n" for i in range(100))


def test_callbacks_may_call_programs_with_callbacks() -> None:
    seen: list[float] = []
    with hcb.accelerate():
        inner = jax.jit(lambda x: [jax.debug.callback(lambda v: seen.append(float(v)), x), x + 1][1])

        def callback(value: Any) -> None:
            seen.append(float(inner(value)) + 100)

        outer = jax.jit(lambda x: [jax.debug.callback(callback, x), x][1])
        for _ in range(3):
            outer(X)
        jax.effects_barrier()
    assert sorted(seen) == [3.0] * 3 + [104.0] * 3


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "where", ["np.asarray(ready)", pytest.param("f(ready)", marks=pytest.mark.native_only)]
)
def test_ctrl_c_reaches_a_thread_that_waits(where: str) -> None:
    program = """
import sys, threading
import jax, numpy as np
import hostcallback as hcb

go, begun, inside = threading.Event(), threading.Event(), threading.Event()

def held(x):
    begun.set()
    inside.wait()
    print("waits", flush=True)
    go.wait(4)

hcb.accelerate()
f = jax.jit(lambda x: [jax.debug.callback(held, x), x + 1][1])
ready = jax.device_put(np.float32(1)).block_until_ready()
if "asarray" in sys.argv[1]:
    threading.Thread(target=f, args=[ready], daemon=True).start()
    begun.wait()
try:
    inside.set()
    eval(sys.argv[1])
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
go.set()
"""
    command = [sys.executable, "-c", program, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[0] == "interrupted\n"
        finally:
            process.kill()


def _interrupted() -> None:
    raise KeyboardInterrupt


_AT_ONCE = native_library.Wait(
    _interrupted
)  # as where Python raises it before the first line of the function


@pytest.mark.native_only  # the buffer protocol is extended by the native library
def test_an_interrupt_is_not_lost_that_comes_before_the_wait_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with monkeypatch.context() as interrupted, hcb.accelerate():  # `hcb.accelerate` hands the wait over
        ready = jax.jit(lambda x: [jax.debug.callback(seen.append, x), x + 1][1])(X).block_until_ready()
        hcb.barrier_wait()
        interrupted.setattr(accelerate, "_WAIT_IN_BUFFER", _AT_ONCE)
        accelerate._restore_waits()
        accelerate._extend_waits()
        try:
            settled().settle(settled().emissions() + 1)
            with pytest.raises(KeyboardInterrupt):
                [np.asarray(ready), sum(range(1000))]
        finally:
            interrupted.undo()
            accelerate._restore_waits()
            accelerate._extend_waits()


def test_callbacks_may_call_it() -> None:
    seen: list[Any] = []
    with hcb.accelerate():

        def callback(value: Any) -> None:
            seen.append(float(jax.block_until_ready(jax.jit(lambda x: x + 1)(value))))

        jax.block_until_ready(jax.jit(lambda x: [jax.debug.callback(callback, x), x][1])(X))
    assert seen == [4.0]


def test_host_functions_may_call_it() -> None:
    def host(value: Any) -> Any:
        return np.asarray(jax.block_until_ready(jax.jit(lambda x: x + 1)(value)))

    with hcb.accelerate():
        ours = jax.jit(
            lambda x: [jax.debug.callback(lambda v: None, x), hcb.call(host, x, result_shape=x)][1]
        )(X)
        assert jax.block_until_ready(ours) == 4


def test_a_callback_that_waits_for_the_blocked_thread_delays_it_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accelerate, "STALL_SEC", 0.1)
    held = Held()
    with hcb.accelerate(), caplog.at_level(logging.WARNING, logger="hostcallback"):
        f = jax.jit(lambda x: [jax.debug.callback(held, x), x][1])
        for _ in range(2):
            jax.block_until_ready(f(X))
            held.order.append("ready")
        held.go.set()
        jax.effects_barrier()
    assert held.order == ["ready", "ready", "called", "called"]
    (record,) = caplog.records
    assert "a wait for a result stops waiting" in record.getMessage()
    assert "test_block_until_ready.py" in record.getMessage()


def test_a_batch_of_many_short_callbacks_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are one message, and the limit is for one callback."""
    monkeypatch.setattr(accelerate, "STALL_SEC", 0.6)  # all take a second
    never, seen = threading.Event(), []

    def callback(value: Any) -> None:
        never.wait(0.01)
        seen.append(float(value))

    with hcb.accelerate():
        f = jax.jit(jax.vmap(lambda x: [jax.debug.callback(callback, x), x][1]))
        jax.block_until_ready(f(np.arange(100.0)))
        assert len(seen) == 100
    assert not caplog.records


def test_it_raises_nothing_and_the_barrier_does() -> None:
    def broken(value: Any) -> None:
        raise ValueError("broken bar")

    with hcb.accelerate():
        jax.block_until_ready(jax.jit(lambda x: [jax.debug.callback(broken, x), x][1])(X))
        with pytest.raises(hcb.TapFunctionException) as caught:
            jax.effects_barrier()
    assert [str(error) for error in caught.value.exceptions] == ["broken bar"]


def test_undone_it_is_jaxs_again() -> None:
    def places() -> list[Any]:
        names = ["block_until_ready", "_value", "__dlpack__"]
        waits = [vars(sync.ArrayImpl)[name] for name in names]
        return [*waits, sync._xla_client.batched_block_until_ready, sync.get_buffer_slot().value]

    before = places()
    with hcb.accelerate():
        with hcb.accelerate():
            assert all(ours is not jaxs for ours, jaxs in zip(places(), before, strict=True))
    assert places() == before


def test_arrays_that_give_out_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        pass

    monkeypatch.setattr(sync, "ArrayImpl", Plain)
    with pytest.raises(LookupError, match="give out no buffers"):
        sync.get_buffer_slot()


def test_a_jax_that_lacks_it_is_told_of_and_works_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    batched = sync._xla_client.batched_block_until_ready
    monkeypatch.delattr(sync._xla_client, "batched_block_until_ready")
    with caplog.at_level(logging.WARNING, logger="hostcallback"):
        acceleration = hcb.accelerate()
    monkeypatch.setattr(sync._xla_client, "batched_block_until_ready", batched, raising=False)
    with acceleration:
        jax.block_until_ready(jax.jit(lambda x: [jax.debug.callback(seen.append, x), x][1])(X))
        jax.effects_barrier()
    assert len(seen) == 1
    (record,) = caplog.records
    assert "has no function batched_block_until_ready. Use jax.effects_barrier()" in record.getMessage()
