"""`outfeed_receiver` scopes taps: the messages it accounts for, the errors it raises, and its end."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime import signals
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.reading.reader import LogReader
from recorder import Recorder
from threads import in_another_thread


def test_the_receiver_drains_and_counts_the_messages_its_block_emitted(rec: Recorder) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    f(jnp.float32(0))
    with hcb.outfeed_receiver(receiver_name="train") as rx:
        for i in range(1, 101):
            f(jnp.float32(i))
    assert len(rec) == 101
    stats = {s.device: s for s in rx.stats}["cpu:0"]
    assert stats.delivered == 100
    assert stats.delivered_bytes == 4 * stats.delivered
    assert (stats.dropped, stats.failed, stats.unknown) == (0, 0, 0)
    f(jnp.float32(7))
    hcb.barrier_wait()
    assert {s.device: s for s in rx.stats}["cpu:0"].delivered == stats.delivered
    assert "cpu:0" in rx.summary()
    assert "'train'" in rx.summary()


def test_taps_before_the_block_belong_to_the_default_receiver() -> None:
    def fail(x: Any) -> None:
        raise ValueError("before")

    f = hcb.jit(lambda x: hcb.id_tap(fail, x))
    f(1.0).block_until_ready()
    with hcb.outfeed_receiver():
        pass
    with pytest.raises(hcb.TapFunctionException, match="1 tap function call"):
        hcb.barrier_wait()


def test_tap_exceptions_are_deferred_and_raised_together_at_the_end() -> None:
    good = Recorder()

    def tap(x: Any, phase: str) -> None:
        if x % 3 == 0:
            raise ValueError(f"cannot take {x}")
        if x % 3 == 1:
            raise KeyError("other")

    @hcb.jit
    def f(x: Any) -> Any:
        hcb.id_tap(tap, x, phase="train")
        return hcb.id_tap(good, x)

    with pytest.raises(hcb.TapFunctionException) as info, hcb.outfeed_receiver():  # noqa: PT012
        for i in range(9):
            f(i)
    assert [int(v) for v in good.values] == list(range(9))
    group = info.value
    assert [type(failure.exception) for failure in group.failures] == [ValueError, KeyError] * 3
    assert [type(e) for e in group.exceptions] == [ValueError, KeyError]
    failure = group.failures[0]
    assert failure.exception is group.exceptions[0]
    assert "test_outfeed_receiver.py" in failure.source_line
    assert failure.device == "cpu:0"
    assert failure.kwargs == {"phase": "train"}
    text = "".join(traceback.format_exception(group))
    assert "cannot take 0" in text
    assert "raise ValueError" in text  # the original traceback shows the tap's own line
    assert "phase='train'" in text
    assert "receiver/runtime/dispatch/dispatcher.py" not in text
    values, rest = group.split(ValueError)  # as `except*` does
    assert isinstance(values, hcb.TapFunctionException)
    assert [len(values.exceptions), len(values.failures)] == [1, 3]
    assert [len(rest.exceptions), len(rest.failures)] == [1, 3]
    hcb.barrier_wait()  # reported once


def test_exceptions_beyond_the_bound_are_counted_by_tap() -> None:
    def tap(x: Any) -> None:
        raise ValueError(int(x))

    f = hcb.jit(lambda x: hcb.id_tap(tap, x))
    with pytest.raises(hcb.TapFunctionException) as info, hcb.outfeed_receiver(max_errors=5):  # noqa: PT012
        for i in range(50):
            f(i)
    assert [failure.exception.args[0] for failure in info.value.failures] == [0, 1, 2, 3, 4]
    ((line, count),) = info.value.suppressed.items()
    assert "test_outfeed_receiver.py" in line
    assert count == 45
    assert "50 tap function call(s) raised" in str(info.value)


def test_transforms_of_a_failing_tap_are_in_the_report() -> None:
    def tap(x: Any) -> None:
        raise ValueError("no")

    with pytest.raises(hcb.TapFunctionException) as info, hcb.outfeed_receiver():
        hcb.jit(jax.vmap(lambda x: hcb.id_tap(tap, x)))(jnp.arange(3.0))
    assert info.value.failures[0].transforms == (("batch", {"batch_dims": (0,)}),)
    assert "batch_dims" in info.value.exceptions[0].__notes__[0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_tap_cannot_end_the_program(kind: type[BaseException]) -> None:
    def tap(x: Any) -> None:
        raise kind("from a tap")

    f = hcb.jit(lambda x: hcb.id_tap(tap, x))
    f(1.0)
    f(2.0)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert len(info.value.failures) == 2
    (error, _) = info.value.exceptions
    assert isinstance(error.__cause__, kind)


def test_an_exception_in_the_block_goes_on_with_the_taps_failures_attached(caplog: Any) -> None:
    delivered = Recorder()

    def tap(x: Any) -> None:
        raise ValueError("in the tap")

    @hcb.jit
    def f(x: Any) -> Any:
        hcb.id_tap(tap, x)
        return hcb.id_tap(delivered, x)

    with pytest.raises(ZeroDivisionError) as info, hcb.outfeed_receiver():  # noqa: PT012
        f(1.0)
        raise ZeroDivisionError("in the block")
    assert len(delivered) == 1
    assert any("1 tap function call" in note for note in info.value.__notes__)
    assert "in the tap" in caplog.text
    hcb.barrier_wait()


def test_a_tap_that_blocks_beyond_the_timeout_is_named_and_nothing_is_lost() -> None:
    release = threading.Event()
    seen: list[int] = []

    def stuck(x: Any) -> None:
        release.wait()
        seen.append(int(x))

    f = hcb.jit(lambda x: hcb.id_tap(stuck, x))
    with pytest.raises(hcb.TapTimeoutError) as info, hcb.outfeed_receiver(timeout_sec=0.3):  # noqa: PT012
        for i in range(4):
            f(i)
    assert "stuck" in str(info.value)
    assert "test_outfeed_receiver.py" in str(info.value)
    assert "queued" in str(info.value)
    release.set()
    hcb.barrier_wait()
    assert seen == [0, 1, 2, 3]
    with hcb.outfeed_receiver():  # the device can be received from again
        f(4)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ended_by", [hcb.TapTimeoutError, KeyboardInterrupt])
def test_a_tap_error_after_its_receiver_gave_up_is_in_the_next_report(ended_by: type[BaseException]) -> None:
    release = threading.Event()

    def stuck(x: Any) -> None:
        release.wait()
        raise ValueError("too late")

    f = hcb.jit(lambda x: hcb.id_tap(stuck, x))
    with pytest.raises(ended_by), hcb.outfeed_receiver(timeout_sec=0.2):  # noqa: PT012
        f(1.0)
        if ended_by is KeyboardInterrupt:
            raise KeyboardInterrupt
    release.set()
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert [str(e) for e in info.value.exceptions] == ["too late"]
    hcb.barrier_wait()


def test_a_second_receiver_on_a_device_is_refused_and_the_first_goes_on(
    tmp_path: Path, rec: Recorder
) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    with hcb.outfeed_receiver(receiver_name="first", devices=jax.devices()[:2]) as first:
        refused = hcb.outfeed_receiver(devices=jax.devices()[1:], record=tmp_path / "refused")
        text = rf"cpu:1 already has the receiver 'first' made at {__file__}:\d+ \(test_a_second"
        with pytest.raises(hcb.DeviceClaimedError, match=text), refused:
            pass
        assert refused.recorder not in signals.watch_termination._flushed  # its log is closed
        with hcb.outfeed_receiver(receiver_name="second", devices=jax.devices()[2:]) as second:
            f(jax.device_put(1.0, jax.devices()[0]))
            f(jax.device_put(2.0, jax.devices()[3]))
    assert [s.device for s in first.stats if s.delivered] == ["cpu:0"]
    assert [s.device for s in second.stats if s.delivered] == ["cpu:3"]


def test_devices_and_backends_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"both devices=.* and backends="):
        hcb.outfeed_receiver(devices=jax.devices(), backends=["cpu"])


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'gppu'.*'cpu'"):
        hcb.outfeed_receiver(backends=["gppu"])
    with pytest.raises(ValueError, match=r"list of platform names, got the string 'cpu'"):
        hcb.outfeed_receiver(backends="cpu")  # type: ignore[arg-type]
    assert len(hcb.outfeed_receiver(backends=["cpu"]).devices) == 4


def test_a_receiver_object_can_be_entered_again(rec: Recorder) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    for _ in range(20):
        with hcb.outfeed_receiver() as rx:
            f(1.0)
        assert sum(s.delivered for s in rx.stats) == 1
    assert len(rec) == 20


@pytest.mark.slow
def test_no_message_escapes_at_the_borders_of_scopes(rec: Recorder) -> None:
    total = 0
    stop = threading.Event()
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))

    def dispatch() -> None:
        while not stop.is_set():
            f(1.0)

    thread = threading.Thread(target=dispatch)
    thread.start()
    for _ in range(10):
        with hcb.outfeed_receiver() as rx:
            f(2.0)
        total += sum(s.delivered for s in rx.stats)
    stop.set()
    thread.join()
    hcb.barrier_wait()
    assert rec.floats().count(2.0) == 10
    assert 10 <= total <= len(rec)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"timeout_sec": None}, "timeout_sec is None, expected a finite number"),
        ({"timeout_sec": -1}, "timeout_sec is -1"),
        ({"max_errors": 0}, "max_errors is 0, expected a whole number of at least 1"),
        ({"devices": ["cpu:0"]}, r"devices takes a list of jax.Device, got \['cpu:0'\]"),
        ({"devices": "cpu"}, "devices takes a list of jax.Device"),
        ({"devices": []}, "got no devices"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hcb.outfeed_receiver(**wrong)


def test_an_interrupt_while_leaving_passes_the_taps_failures_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostcallback.api import receiver as outfeed

    def fail(x: Any) -> None:
        raise ValueError("before the interrupt")

    wait = outfeed.wait_for_taps

    def interrupted(*args: Any, **kwargs: Any) -> None:
        wait(*args, **kwargs)
        raise KeyboardInterrupt

    f = hcb.jit(lambda x: hcb.id_tap(fail, x))
    with pytest.raises(KeyboardInterrupt), hcb.outfeed_receiver():  # noqa: PT012
        f(1.0)
        monkeypatch.setattr(outfeed, "wait_for_taps", interrupted)
    monkeypatch.undo()
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert [str(e) for e in info.value.exceptions] == ["before the interrupt"]
    with hcb.outfeed_receiver():  # the devices are free again
        pass


@pytest.mark.slow
def test_leaving_while_another_thread_keeps_emitting_to_slow_taps() -> None:
    stop = threading.Event()
    pause = threading.Event()

    def slow(x: Any) -> None:
        pause.wait(0.004)

    f = hcb.jit(lambda x: hcb.id_tap(slow, x))
    f(0.0)

    def emit() -> None:
        while not stop.wait(0.003):
            f(1.0)

    thread = threading.Thread(target=emit)
    thread.start()
    try:
        with hcb.outfeed_receiver(timeout_sec=0.5):  # far less than the backlog takes, far more than one tap
            for _ in range(200):
                f(2.0)
    finally:
        stop.set()
        thread.join()
        pause.set()
    hcb.barrier_wait()


def test_a_receiver_accounts_for_programs_dispatched_inside_and_records_them(
    tmp_path: Path, rec: Recorder
) -> None:
    x = jnp.ones((64, 64)) * 1e-2

    def steps(x: Any) -> Any:
        return lax.scan(lambda c, i: (hcb.id_tap(rec, c @ c * 1e-3), None), x, length=200)[0]

    earlier = jax.jit(steps)
    later = jax.jit(lambda x: hcb.id_tap(rec, x, name="later"))
    earlier(x)
    later(1.0)
    hcb.barrier_wait()
    for _ in range(3):
        earlier(x)  # and its result is dropped
    in_another_thread(lambda: (earlier(x), None)[1])
    with hcb.outfeed_receiver(record=tmp_path / "log") as rx:
        later(2.0)
    assert [row.delivered for row in rx.stats if row.delivered] == [1]
    assert len(list(LogReader(tmp_path / "log").messages())) == 1
    assert len(rec) == 5 * 200 + 2


@pytest.mark.native_only  # computations with Python callbacks are over when their calls return
def test_a_receiver_entered_during_endless_work_reports_it_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    f = jax.jit(lambda x: hcb.call(lambda v: (release.wait(), v)[1], x, result_shape=x))
    thread = threading.Thread(target=lambda: f(jnp.float32(1.0)).block_until_ready())
    started = jax.jit(lambda x: hcb.id_tap(lambda v: None, x))
    started(1.0)
    hcb.barrier_wait()
    thread.start()
    receiver = runtime.receivers(["cpu:0"])[0]
    while not receiver.calls.running:
        pass
    with hcb.outfeed_receiver(timeout_sec=0.3):
        release.set()
        thread.join()
    assert "dispatched before it have not ended after 0.3 s" in caplog.text
