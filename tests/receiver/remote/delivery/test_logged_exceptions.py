"""A collector's log tells of the exceptions of consumers, rarely, and of all of them at the end."""

from __future__ import annotations

import pytest

from hostcallback.receiver import errors, limits
from hostcallback.receiver.remote.delivery.stream_printer import RateLimitedErrorLog


def report(*taps: str, more: int = 0, others: tuple[Exception, ...] = ()) -> errors.TapFunctionException:
    """What is raised if the functions of these taps raise; `others` are errors of no consumer."""
    failures = [
        errors.TapFailure(ValueError(f"{tap} {seq}"), tap, "train.py:1 (f)", "cpu:0", seq)
        for seq, tap in enumerate(taps)
    ]
    raised = [failure.exception for failure in failures if isinstance(failure.exception, Exception)]
    suppressed = {"train.py:1 (f)": more} if more else {}
    return errors.TapFunctionException("raised", [*raised, *others], failures, suppressed)


def test_the_first_tenth_and_hundredth_of_a_kind_are_logged_and_the_total(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedErrorLog()
    for _ in range(25):
        log.log(report("loss", "loss", "loss", "loss"))
    log.log(report("loss", "once"))
    assert caplog.messages == [
        "ValueError: loss 0",
        "ValueError: loss 1; 10 times by now",
        "ValueError: loss 3; 100 times by now",
        "ValueError: once 1",
    ]
    caplog.clear()
    log.end()
    assert caplog.messages == [
        "ValueError was raised by tap loss at train.py:1 (f), device cpu:0: 101 times in all"
    ]


def test_kinds_beyond_the_limit_count_together(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COUNTED_NAMES", 2)
    log = RateLimitedErrorLog()
    log.log(report(*(f"tap {number}" for number in range(12))))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"ValueError: tap {number} {number}" for number in (0, 1, 2, 11)
    ]
    caplog.clear()
    log.end()
    assert caplog.messages == []


def test_every_error_of_no_consumer_is_logged_and_what_was_left_out_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedErrorLog()
    for number in range(2):
        log.log(report("loss", more=7, others=(KeyError(number),)))
    left_out = "7 more exceptions of consumers are not shown"
    assert caplog.messages == [
        "ValueError: loss 0", "KeyError: 0", left_out, "KeyError: 1", left_out
    ]  # fmt: skip
