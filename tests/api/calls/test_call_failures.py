"""An error or a wrong result of a host function reaches the program's caller and the barrier."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.dispatch.dispatcher import Dispatcher
from hostcallback.receiver.runtime.runtime import runtime
from python_process import run_python
from transforming import PROGRAM_FAILED, Jit

F32 = jax.ShapeDtypeStruct((), np.float32)


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class NotPositive(Exception):
    pass


def root(x: Any) -> Any:
    if x < 0:
        raise NotPositive(f"got {x}")
    return np.sqrt(x)


def deferred() -> hcb.TapFunctionException:
    """The errors that the next barrier raises."""
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    return caught.value


def test_the_caller_gets_the_traceback_and_the_next_computation_works(jit: Jit) -> None:
    f = jit(lambda x: hcb.call(root, x, result_shape=x) + 1)
    for _ in range(3):
        with pytest.raises(PROGRAM_FAILED) as caught:
            jax.block_until_ready(f(jnp.float32(-4)))
        text = str(caught.value)
        assert "NotPositive: got -4.0" in text
        assert f"root at {__file__}:" in text
        assert 'raise NotPositive(f"got {x}")' in text  # the host function's own traceback
        assert float(f(jnp.float32(4))) == 3
    error = deferred()
    assert [type(failure.exception) for failure in error.failures] == [NotPositive] * 3
    assert all("test_call_failures.py" in e.__notes__[0] for e in error.exceptions)
    assert {failure.tap for failure in error.failures} == {"root"}
    hcb.barrier_wait()


def test_a_program_that_fails_half_way_runs_no_more_calls() -> None:
    seen: list[int] = []

    def host(i: Any) -> Any:
        seen.append(int(i))
        if i == 3:
            raise NotPositive("enough")
        return i

    f = jax.jit(lambda x: lax.fori_loop(0, 10, lambda i, c: c + hcb.call(host, i, result_shape=i), x))
    with pytest.raises(PROGRAM_FAILED, match="enough"):
        jax.block_until_ready(f(0))
    assert seen == [0, 1, 2, 3]
    deferred()


def test_a_call_on_one_of_several_devices_fails_the_program() -> None:
    def host(x: Any, device: Any) -> Any:
        if device.id == 2:
            raise NotPositive("on device 2")
        return x

    mesh = Mesh(np.array(jax.devices()), ("i",))
    spec = PartitionSpec("i")
    f = jax.jit(
        jax.shard_map(lambda x: hcb.call(host, x, result_shape=x), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    with pytest.raises(PROGRAM_FAILED, match="on device 2"):
        jax.block_until_ready(f(jnp.arange(4.0)))
    assert [failure.device for failure in deferred().failures] == ["cpu:2"]
    g = jax.jit(lambda x: hcb.call(lambda x: x + 1, x, result_shape=x))
    for device in jax.devices():
        assert float(g(jax.device_put(1.0, device))) == 2


@pytest.mark.parametrize("tapped", [False, True])
def test_after_a_failure_on_several_devices_neither_the_next_program_nor_jaxs_barrier_fails(
    tapped: bool,
) -> None:
    begun = threading.Event()

    def host(x: Any, device: Any) -> Any:
        begun.wait()  # the program goes on while the next one is dispatched
        if device.id == 1:
            raise NotPositive("on device 1")
        return x

    def body(x: Any) -> Any:
        x = hcb.id_tap(lambda v: None, x) if tapped else x
        return hcb.call(host, x, result_shape=x)

    mesh = Mesh(jax.devices(), ("i",))
    manual = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    f = jax.jit(jax.shard_map(body, **manual))
    seen: list[float] = []
    g = jax.jit(jax.shard_map(lambda x: hcb.id_tap(lambda v: seen.append(float(v[0])), x), **manual))
    x = jnp.arange(4.0)
    threading.Timer(0.1, begun.set).start()
    with contextlib.suppress(*PROGRAM_FAILED):  # hcb.jit waits where it is called
        f(x)
    assert g(x).tolist() == x.tolist()
    assert isinstance(deferred().exceptions[0], NotPositive)
    assert sorted(seen) == [0, 1, 2, 3]
    with contextlib.suppress(*PROGRAM_FAILED):
        f(x).block_until_ready()
    deferred()
    jax.effects_barrier()


def test_a_nested_failure_reaches_the_outermost_caller() -> None:
    inner = jax.jit(lambda x: hcb.call(root, x, result_shape=x))
    outer = jax.jit(lambda x: hcb.call(lambda x: np.asarray(inner(x)), x, result_shape=x))
    with pytest.raises(PROGRAM_FAILED, match=r"NotPositive: got -1\.0"):
        jax.block_until_ready(outer(jnp.float32(-1)))
    assert [type(e) for e in deferred().exceptions] == [NotPositive, jax.errors.JaxRuntimeError]
    assert float(outer(jnp.float32(9))) == 3


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()], ids=repr)
def test_a_non_ordinary_exception_ends_the_program_only(error: BaseException) -> None:
    def host(x: Any) -> Any:
        raise error

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    with pytest.raises(PROGRAM_FAILED, match=type(error).__name__):
        f(jnp.float32(1))
    assert type(error).__name__ in str(deferred().exceptions[0])


MISMATCHES = [
    (F32, lambda x: np.zeros(3, np.float32), r"float32\[3\] as result, expected float32\[\]: make it return"),
    (
        array(2, 3),
        lambda x: np.zeros((3, 2), np.float32),
        r"float32\[3, 2\] as result, expected float32\[2, 3\]",
    ),
    (array(2), lambda x: np.zeros(2, np.int32), r"int32\[2\] as result, expected float32\[2\]"),
    (array(2, dtype=np.int32), lambda x: np.zeros(2), r"float64\[2\] as result, expected int32\[2\]"),
    (array(2), lambda x: 1.0, r"float64\[\] as result, expected float32\[2\]"),
    (0, lambda x: 1.5, r"float64\[\] as result, expected int32\[\]"),
    (np.int8(0), lambda x: 200, r"returned 200 as result, expected a int8, which cannot hold it"),
    (np.zeros(1, int), lambda x: np.array([2**40]), r"values as result that int32 cannot hold"),
    (F32, lambda x: None, r"returned a PyTreeDef\(None\), expected a PyTreeDef\(\*\)"),
    ((F32, F32), lambda x: [x, x], r"returned a PyTreeDef\(\[\*, \*\]\), expected a PyTreeDef\(\(\*, \*\)\)"),
    (
        {"a": F32},
        lambda x: {"b": x},
        r"returned a PyTreeDef\(\{'b': \*\}\), expected a PyTreeDef\(\{'a': \*\}\)",
    ),
    (
        {"a": (F32, array(2))},
        lambda x: {"a": (x, x)},
        r"float32\[\] as result\['a'\]\[1\], expected float32\[2\]",
    ),
    (None, lambda x: x, r"returned a PyTreeDef\(\*\), expected a PyTreeDef\(None\)"),
    (F32, lambda x: "text", r"<U4\[\] as result, expected float32\[\]"),
    (F32, lambda x: object(), r"object\[\] as result, expected float32\[\]"),
]


@pytest.mark.parametrize(("result_shape", "host", "text"), MISMATCHES, ids=[text for *_, text in MISMATCHES])
def test_a_wrong_result_is_shown_together_with_the_announced_one(
    result_shape: Any, host: Any, text: str
) -> None:
    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=result_shape, name="host"))
    with pytest.raises(PROGRAM_FAILED, match=text) as caught:
        jax.block_until_ready((f(jnp.float32(1)), 0))
    assert "the call of host at " in str(caught.value)
    assert "test_call_failures.py" in str(caught.value)
    (error,) = deferred().exceptions
    assert isinstance(error, hcb.CallResultError)
    assert isinstance(error, TypeError)


def test_an_array_that_cannot_be_had_is_named_with_the_reason() -> None:
    class Broken:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("the disk is gone")

    f = hcb.jit(lambda x: hcb.call(lambda x: Broken(), x, result_shape=x))
    with pytest.raises(PROGRAM_FAILED, match=r"Broken, which is not an array as result") as caught:
        f(jnp.float32(1))
    assert "the disk is gone" in str(caught.value)
    deferred()


def test_failures_beyond_the_receivers_bound_are_counted() -> None:
    f = hcb.jit(lambda x: hcb.call(root, x, result_shape=x))
    with pytest.raises(hcb.TapFunctionException) as caught:  # noqa: PT012, the block's end raises
        with hcb.outfeed_receiver(max_errors=2) as receiver:
            for _ in range(5):
                with pytest.raises(PROGRAM_FAILED):
                    f(jnp.float32(-1))
    assert len(caught.value.failures) == 2
    assert sum(caught.value.suppressed.values()) == 3
    (row,) = [row for row in receiver.stats if row.delivered]
    assert (row.delivered, row.failed) == (5, 5)


def test_a_failure_after_its_receiver_was_left_is_reported_by_it() -> None:
    entered, gate = threading.Event(), threading.Event()

    def host(x: Any) -> Any:
        entered.set()
        gate.wait(60)
        raise NotPositive("late")

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    errors: list[BaseException] = []

    def program() -> None:
        try:
            f(jnp.float32(1))
        except PROGRAM_FAILED as error:
            errors.append(error)

    thread = threading.Thread(target=program)
    leaving = threading.Thread(target=gate.set)
    with pytest.raises(hcb.TapFunctionException, match="1 tap function call"):  # noqa: PT012, the block's end raises
        with hcb.outfeed_receiver():
            thread.start()
            assert entered.wait(60)
            leaving.start()
    thread.join()
    assert "late" in str(errors[0])


def test_a_barrier_that_gives_up_names_the_host_function() -> None:
    entered, gate = threading.Event(), threading.Event()

    def patient(x: Any) -> Any:
        entered.set()
        gate.wait(60)
        return x

    f = hcb.jit(lambda x: hcb.call(patient, x, result_shape=x))
    thread = threading.Thread(target=lambda: f(jnp.float32(1)))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(
        hcb.TapTimeoutError, match=r"patient, the host function of the call at .*test_call_failures"
    ):
        with hcb.outfeed_receiver(timeout_sec=0.05):
            pass
    gate.set()
    thread.join()
    hcb.barrier_wait()


@pytest.mark.parametrize(
    "wait", [hcb.barrier_wait, lambda: hcb.outfeed_receiver().__exit__(None, None, None)]
)
def test_a_host_function_may_not_wait_for_the_program_that_waits_for_it(wait: Any) -> None:
    def host(x: Any) -> Any:
        wait()
        return x

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    with pytest.raises(PROGRAM_FAILED, match="would wait for the program that waits for it"):
        f(jnp.float32(1))
    assert isinstance(deferred().exceptions[0], hcb.ReentrantWaitError)


BEHIND_A_TAP = """
import contextlib, threading
import jax
import hostcallback as hcb
import hostcallback.lifecycle.wait_bounds as at_exit

at_exit.EXIT_STALL_SEC = 0.1
begun = threading.Event()

def stuck(x):
    begun.set()
    threading.Event().wait()

@jax.jit
def program(x):
    hcb.tap(stuck, x)
    return hcb.call(lambda x: x, x, result_shape=x)

def run():
    with contextlib.suppress(Exception):
        program(1.0)

threading.Thread(target=run, daemon=True).start()
begun.wait()
"""


def test_a_call_behind_a_tap_that_never_returns_ends_with_the_process_and_the_loss_is_said() -> None:
    ended = run_python("-c", BEHIND_A_TAP, timeout_sec=60)
    assert ended.returncode == 0, ended.stderr
    assert "tap stuck at " in ended.stderr
    assert "message(s) of cpu:0 were lost at exit\n" in ended.stderr


def test_nothing_is_left_behind(transport: str) -> None:
    f = hcb.jit(lambda x: hcb.call(root, x, result_shape=x))
    for x in (4.0, -4.0) * 10:
        with contextlib.suppress(*PROGRAM_FAILED):
            f(jnp.float32(x))
    assert len(deferred().failures) == 10
    for receiver in runtime.receivers():
        assert not receiver.calls.running
        assert receiver.queued() == 0
        assert not any(receiver.scope._calls.values())
        if transport == "native":
            assert native_library.load().hcb_call_count(receiver.source.device) == 0


def test_a_call_for_which_there_is_no_memory_fails_and_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def calls(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.call(np.sqrt, c, result_shape=c) + 2, None), x, length=5)[0]

    mesh, spec = Mesh(np.array(jax.devices()), ("i",)), PartitionSpec("i")
    f = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=spec, out_specs=spec))  # XLA's threads run it
    x = np.arange(len(jax.devices()), dtype=np.float32)
    ready = np.asarray(f(x))
    decode = Dispatcher.decode
    left = 0

    def short(dispatcher: Dispatcher, batch: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("planted")
        return decode(dispatcher, batch)

    monkeypatch.setattr(Dispatcher, "decode", short)
    for at in 1, 12:
        left = at
        with pytest.raises(PROGRAM_FAILED):
            f(x).block_until_ready()
        assert left <= 0
        np.testing.assert_array_equal(f(x), ready)
    assert "no memory for messages of" in str([*deferred().exceptions])
    assert all(receiver.queued() == 0 for receiver in runtime.receivers())
