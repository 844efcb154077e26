"""`jax.block_until_ready` waits for accelerated callbacks; programs rely on that before they close files."""

from __future__ import annotations

import logging
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
from hostcallback.lifecycle import readiness

X = np.float32(3)
WAIT_SEC = 60.0

WAYS: dict[str, Callable[[Any], Any]] = {
    "one": jax.block_until_ready,
    "several": lambda x: jax.block_until_ready({"a": x, "b": [x + 1]}),
    "method": lambda x: x.block_until_ready(),
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
        result = jax.jit(lambda x: [jax.debug.callback(held, x), x][1])(X)

        def block() -> None:
            WAYS[way](result)
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


def test_prints_alone_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        def write(self, text: str) -> None:
            held(text)

        def flush(self) -> None:
            pass

    held = Held()
    monkeypatch.setattr(readiness, "_expected", False)
    monkeypatch.setattr(sys, "stdout", Screen())
    with hcb.accelerate():
        jax.block_until_ready(jax.jit(lambda x: [jax.debug.print("{}", x), x][1])(X))
        held.go.set()
        jax.effects_barrier()
    assert "called" in held.order


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
    monkeypatch.setattr(readiness, "STALL_SEC", 0.1)
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
    assert "jax.block_until_ready stops waiting" in record.getMessage()
    assert "test_block_until_ready.py" in record.getMessage()


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
        return [sync.ArrayImpl.block_until_ready, sync._xla_client.batched_block_until_ready]

    before = places()
    with hcb.accelerate():
        with hcb.accelerate():
            assert all(ours is not jaxs for ours, jaxs in zip(places(), before, strict=True))
    assert places() == before


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
