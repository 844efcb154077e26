"""Failures of taps show at once: a log line for the first of each tap, a cause in the exception, an exit status."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.failures import failure_report
from python_process import run_python
from threads import wait_for


def bad(value: Any) -> None:
    raise ValueError(f"no\n{value}")


def failing(steps: int) -> Any:
    return jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.id_tap(bad, c, name="loss") + 1, None), x, None, length=steps)[0]
    )


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the log of failures, which a test moves on."""
    now = [0.0]
    monkeypatch.setattr(failure_report.time, "monotonic", lambda: now[0])
    return now


def test_the_first_failure_of_each_tap_is_one_log_line_at_once(caplog: pytest.LogCaptureFixture) -> None:
    failing(500)(jnp.float32(0)).block_until_ready()
    jax.jit(lambda x: hcb.id_tap(bad, x, name="norm"))(1.0).block_until_ready()
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()
    first, second = errors(caplog)
    assert first.startswith("tap loss at ")
    assert f"{__file__}:" in first
    assert first.endswith("raised on cpu:0: ValueError: no 0.0")
    assert second.startswith("tap norm at ")


def test_further_failures_are_counted_in_one_line_per_period(
    caplog: pytest.LogCaptureFixture, now: list[float]
) -> None:
    log = failure_report.FailureLog()
    for second in range(150):
        now[0] = float(second)
        log.add(hcb.TapFailure(KeyError(second), "loss", "a.py:1", "cpu:0", second))
    assert errors(caplog) == [
        "tap loss at a.py:1 raised on cpu:0: KeyError: 0",
        "tap loss at a.py:1 raised 60 more times, 61 in all, the last on cpu:0: KeyError: 60",
        "tap loss at a.py:1 raised 60 more times, 121 in all, the last on cpu:0: KeyError: 120",
    ]


@jax.jit
def checks(x: Any) -> Any:
    hcb.check(x < 2, "{} is\ntoo large", x, name="small")
    return hcb.check(x < 4, "larger still", name="medium")


def test_the_first_failure_of_each_check_is_one_log_line_at_once(caplog: pytest.LogCaptureFixture) -> None:
    collected = hcb.error_collector()
    collected.__enter__()
    for number in range(6):
        checks(jnp.int32(number))
    wait_for(lambda: len(errors(caplog)) == 2, timeout_sec=20)  # without a barrier
    small, medium = errors(caplog)
    with pytest.raises(hcb.TapFunctionException):
        collected.__exit__(None, None, None)
    assert small.startswith(f"check small at {__file__}:")
    assert small.endswith(" failed on cpu:0: 2 is too large")
    assert medium.endswith(" failed on cpu:0: larger still")
    assert len(errors(caplog)) == 2  # leaving logs nothing more
    assert [(failed.name, failed.count) for failed in collected.failed_checks] == [
        ("small", 4),
        ("medium", 2),
    ]


def test_a_watched_operation_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    hcb.watch_nonfinite(jax.jit(jnp.log))(jnp.float32(-1)).block_until_ready()
    wait_for(lambda: errors(caplog), timeout_sec=20)
    assert errors(caplog)[0].startswith("watched operation log at ")
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()


def fail_the_check() -> None:
    checks(jnp.int32(3))


watched = hcb.watch_nonfinite(jax.jit(jnp.log))


def fail_the_watch() -> None:
    watched(jnp.float32(-1))


@pytest.mark.parametrize(
    ("fail", "seconds", "starts", "ends"),
    [
        (fail_the_check, (0, 30, 61), "small at ", "2 more times, 3 in all"),
        (fail_the_watch, (0, 30, 59, 61, 62), "log at ", "3 more times, 4 in all"),
    ],
    ids=["check", "watch"],
)
def test_further_failures_are_counted_once_a_minute_also_after_barriers(
    caplog: pytest.LogCaptureFixture,
    now: list[float],
    fail: Callable[[], None],
    seconds: tuple[int, ...],
    starts: str,
    ends: str,
) -> None:
    with hcb.outfeed_receiver() as receiver:
        for second in seconds:
            now[0] = float(second)
            fail()
            with pytest.raises(hcb.TapFunctionException):
                hcb.barrier_wait()
    first, further = errors(caplog)
    assert first.startswith("watched operation log at ") or first.endswith(" on cpu:0: 3 is too large")
    assert further.startswith(starts)
    assert further.endswith(f" failed {ends}, the last on cpu:0")
    assert [failed.count for failed in receiver.failed_checks] == [len(seconds)]


def test_warnings_of_a_check_are_counted_once_a_minute(
    caplog: pytest.LogCaptureFixture, now: list[float]
) -> None:
    with hcb.outfeed_receiver(on_error="warn"):
        for second in (0, 30, 59, 61, 62):
            now[0] = float(second)
            checks(jnp.int32(3))
            hcb.barrier_wait()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told[0].startswith("check failed: 3 is")
    assert told[1].endswith(" failed 3 more times, 4 in all, the last on cpu:0")
    assert len(told) == 3  # with the summary of the receiver
    assert errors(caplog) == []


def test_what_was_only_warned_of_can_be_asked_for_afterwards() -> None:
    with hcb.error_collector(on_error="warn") as collected:
        checks(jnp.int32(3))
    assert [failed.name for failed in collected.failed_checks] == ["small"]


def test_a_checked_step_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(hcb.TapFunctionException):
        hcb.checked(checks)(jnp.int32(3))
    assert errors(caplog) == []


def test_an_exception_without_a_text_and_one_that_has_none_to_give(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    log = failure_report.FailureLog()
    for number, error in enumerate([AssertionError(), Odd(), ValueError("x" * 10_000)]):
        log.add(hcb.TapFailure(error, "loss", f"a.py:{number}", "cpu:0", 1))
    empty, odd, long = errors(caplog)
    assert empty.endswith(": AssertionError")
    assert odd.endswith(": Odd: (its text could not be made)")
    assert len(long) < 700


def test_the_exception_names_the_first_cause() -> None:
    with pytest.raises(hcb.TapFunctionException) as raised:
        with hcb.outfeed_receiver():
            failing(3)(jnp.float32(7)).block_until_ready()
    assert "3 tap function call(s) raised" in str(raised.value)
    assert "the first was ValueError: no 7.0 (tap loss at " in str(raised.value)


def test_many_failures_are_one_traceback_with_a_count() -> None:
    with pytest.raises(hcb.TapFunctionException) as raised:
        with hcb.outfeed_receiver():
            failing(20_000)(jnp.float32(0)).block_until_ready()
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("ValueError: no") == 2, text  # the headline's and the traceback's
    assert text.count("raise ValueError") == 1
    assert "20,000 exceptions were raised at this line in all" in text
    assert len(raised.value.failures) == 100


def test_few_failures_of_a_line_are_all_in_the_group() -> None:
    with pytest.raises(hcb.TapFunctionException) as raised:
        with hcb.outfeed_receiver():
            failing(5)(jnp.float32(0)).block_until_ready()
    assert [str(error) for error in raised.value.exceptions] == [f"no\n{step}.0" for step in range(5)]
    assert all("in all" not in note for error in raised.value.exceptions for note in error.__notes__)


def test_failures_that_differ_in_more_than_numbers_are_reported_apart() -> None:
    def bad_in_two_ways(step: Any) -> None:
        raise ValueError("no file" if step % 2 else f"{step} is even")

    f = jax.jit(lambda x: hcb.id_tap(bad_in_two_ways, x))
    for step in range(10):
        f(step).block_until_ready()
    with pytest.raises(hcb.TapFunctionException) as raised:
        hcb.barrier_wait()
    assert [str(error) for error in raised.value.exceptions] == ["0 is even", "no file"]
    assert len(raised.value.failures) == 10


def test_on_error_warn_logs_failures_of_taps_and_raises_none(caplog: pytest.LogCaptureFixture) -> None:
    with hcb.outfeed_receiver(on_error="warn") as rx:
        failing(30)(jnp.float32(0)).block_until_ready()
    assert sum(row.failed for row in rx.stats) == 30
    assert len(errors(caplog)) == 1
    assert any("30 tap function call(s) raised" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["raise_soon", "abort"])
def test_the_next_call_raises_the_failure_of_a_tap(policy: str) -> None:
    f = failing(2)

    def call_often() -> None:
        for _ in range(1000):
            f(jnp.float32(0)).block_until_ready()

    with contextlib.suppress(hcb.TapFunctionException):  # of the last calls
        with hcb.outfeed_receiver(on_error=policy):
            f(jnp.float32(0)).block_until_ready()
            with pytest.raises(hcb.TapFunctionException, match="the first was ValueError"):
                call_often()


PROGRAM = """
import sys
import jax
import hostcallback as hcb

def bad(value):
    raise ValueError("bad")

f = jax.jit(lambda x: hcb.id_tap(bad, x))
for _ in range(20):
    f(1.0).block_until_ready()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "switch", "status"),
    [
        ("", "1", 1),
        ("", "0", 0),
        ("sys.exit(3)", "1", 3),
        ("raise KeyError('own')", "1", 1),
        ("try:\n    hcb.barrier_wait()\nexcept* ValueError:\n    pass", "1", 0),
    ],
)
def test_failures_that_were_not_reported_make_the_exit_status(end: str, switch: str, status: int) -> None:
    done = run_python("-c", PROGRAM + end, timeout_sec=110, HOSTCALLBACK_EXIT_STATUS=switch)
    assert done.returncode == status, done.stderr
    if not end:
        assert "20 tap function call(s) raised" in done.stderr
        assert done.stderr.count("Traceback (most recent call last)") == 1
