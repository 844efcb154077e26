"""The drop-in's waiting, errors and configuration flags."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback
from hostcallback import host_callback as hcb
from python_process import python_output
from threads import in_threads


def boom(arg: Any, transforms: Any) -> None:
    raise ValueError(f"boom {arg}")


def test_exceptions_are_logged_and_raised_by_the_barrier(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        x = hcb.id_tap(lambda x, _: seen.append(float(x)), x + 1)
        x = hcb.id_tap(boom, x + 1)
        return hcb.id_tap(lambda x, _: seen.append(float(x)), x + 1)

    assert float(jax.jit(f)(0.0)) == 3.0  # the computation and the other taps go on
    with pytest.raises(hcb.CallbackException) as info:
        hcb.barrier_wait("after f")
    assert seen == [1.0, 3.0]
    text = str(info.value)
    assert text.startswith("There were exceptions during callback processing. Last one was: Traceback")
    assert "ValueError: boom 2.0" in text
    assert "in boom" in text
    assert isinstance(info.value.__cause__, ValueError)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(logged) == 1
    assert logged[0].startswith("Postponing exception raised in callback function: Traceback")
    assert "ValueError: boom 2.0" in logged[0]


def test_the_barrier_reports_the_last_exception_and_keeps_all() -> None:
    for i in range(3):
        hcb.id_tap(boom, i)
    with pytest.raises(hcb.CallbackException, match="boom 2") as info:
        hcb.barrier_wait()
    assert [str(f.exception) for f in info.value.group.failures] == ["boom 0", "boom 1", "boom 2"]
    assert all("test_host_callback_barrier.py" in f.source_line for f in info.value.group.failures)


def test_a_reported_exception_is_not_reported_again() -> None:
    hcb.id_tap(boom, 1)
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()
    hcb.barrier_wait()


def test_a_stream_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError("disk full")

    hcb.id_print(1.0, output_stream=Full())
    with pytest.raises(hcb.CallbackException, match="disk full"):
        hcb.barrier_wait()
    assert "disk full" in caplog.text


def test_the_barrier_waits_for_computations_of_other_threads() -> None:
    seen: list[int] = []
    f = jax.jit(lambda x: hcb.id_tap(lambda x, _: seen.append(int(x)), x))
    in_threads(f, 4)
    hcb.barrier_wait()
    assert sorted(seen) == [0, 1, 2, 3]


def test_stopping_waits_and_leaves_errors_to_the_barrier() -> None:
    seen: list[float] = []
    release = threading.Event()

    def slow(arg: Any, transforms: Any) -> None:
        assert release.wait(60)
        seen.append(float(arg))

    hcb.id_tap(slow, 1.0)
    hcb.id_tap(boom, 2.0)
    threading.Timer(0.05, release.set).start()
    hcb.stop_outfeed_receiver()
    assert seen == [1.0]
    with pytest.raises(hcb.CallbackException, match="boom"):
        hcb.barrier_wait()
    hcb.id_tap(slow, 3.0)  # taps work as before
    hcb.barrier_wait()
    assert seen == [1.0, 3.0]


def test_waiting_inside_a_tap_is_refused() -> None:
    hcb.id_tap(lambda arg, transforms: hcb.barrier_wait(), 1.0)
    with pytest.raises(hcb.CallbackException) as info:
        hcb.barrier_wait()
    assert isinstance(info.value.__cause__, hostcallback.ReentrantWaitError)


def test_the_barriers_name_is_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="hostcallback"):
        hcb.barrier_wait("first")
    assert "barrier_wait[first]: start" in caplog.messages
    assert "barrier_wait[first]: done" in caplog.messages


@pytest.fixture
def inline() -> Any:
    jax.config.update("jax_host_callback_inline", True)
    yield
    jax.config.update("jax_host_callback_inline", False)


@pytest.mark.usefixtures("inline")
def test_inline_taps_run_on_the_calling_thread_and_raise_there() -> None:
    threads: list[threading.Thread] = []
    arrived: list[Any] = []

    def tap(arg: Any, transforms: Any, *, device: Any) -> None:
        threads.append(threading.current_thread())
        arrived.append((arg.tolist(), transforms, device))

    assert float(hcb.id_tap(tap, 1.0, tap_with_device=True)) == 1.0
    assert hcb.id_tap(tap, 2.0, result="result", tap_with_device=True, device_index=1) == "result"
    assert threads == [threading.current_thread()] * 2
    assert arrived == [(1.0, [], jax.devices()[0]), (2.0, [], jax.devices()[1])]
    with pytest.raises(ValueError, match="boom"):
        hcb.id_tap(boom, 1.0)


@pytest.mark.usefixtures("inline")
def test_inline_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    hcb.id_print((1.0, jnp.arange(2)), what="x")
    assert capsys.readouterr().out == "what: x\n( 1. [0 1] )\n"


@pytest.mark.usefixtures("inline")
def test_inline_leaves_traced_taps_to_the_receivers() -> None:
    threads: list[threading.Thread] = []

    def tap(arg: Any, transforms: Any) -> None:
        threads.append(threading.current_thread())

    jax.jit(lambda x: hcb.id_tap(tap, x))(1.0)
    jax.vmap(lambda x: hcb.id_tap(tap, x))(jnp.arange(2))
    hcb.barrier_wait()
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_flags_without_effect_can_be_set_and_warn(caplog: pytest.LogCaptureFixture) -> None:
    flags = {
        "jax_host_callback_max_queue_byte_size": (2**30, 256_000_000),
        "jax_host_callback_outfeed": (True, False),
        "jax_host_callback_legacy": (True, False),
    }
    with caplog.at_level(logging.INFO, logger="hostcallback"):
        for name, (value, default) in flags.items():
            jax.config.update(name, value)
            assert f"{name}={value} has no effect" in caplog.text
            jax.config.update(name, default)


@pytest.mark.slow
def test_flags_are_read_from_the_environment() -> None:
    program = (
        "from hostcallback import host_callback as hcb\n"
        "hcb.id_tap(lambda x, transforms: print('inline', x), 1.0)\n"
        "print('after')\n"
    )
    printed = python_output("-c", program, JAX_HOST_CALLBACK_INLINE="1", JAX_HOST_CALLBACK_LEGACY="1")
    assert printed == "inline 1.0\nafter\n"


@pytest.mark.slow
def test_the_last_messages_are_delivered_at_exit() -> None:
    program = (
        "import time\n"
        "from hostcallback import host_callback as hcb\n"
        "hcb.id_tap(lambda x, transforms: (time.sleep(0.2), print('tapped', x)), 1.0)\n"
    )
    assert python_output("-c", program) == "tapped 1.0\n"
