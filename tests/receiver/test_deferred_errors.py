"""Errors of taps that no thread has taken: how many there are, and the report of them that takes none."""

from __future__ import annotations

import pytest

from hostcallback.receiver.errors import TapFailure, TapFunctionException
from hostcallback.receiver.failures.deferred_errors import DeferredErrors, OnError


def failure(text: str) -> TapFailure:
    return TapFailure(ValueError(text), "tap", "here.py:1 (f)", "cpu:0", 0)


def texts(report: TapFunctionException | None) -> list[str]:
    return [] if report is None else [str(each.exception) for each in report.failures]


def test_a_look_at_failures_takes_none() -> None:
    deferred = DeferredErrors(2)
    assert (deferred.peek(), deferred.failed()) == (None, 0)
    for number in range(3):
        deferred.add_failure(failure(f"bug {number}"))
    for _ in range(2):
        report = deferred.peek()
        assert texts(report) == ["bug 0", "bug 1"]
        assert str(report).startswith("3 tap function call(s) raised")
        assert deferred.failed() == 3
    taken = deferred.take()
    assert texts(taken) == ["bug 0", "bug 1"]
    assert texts(report) == ["bug 0", "bug 1"]
    assert (deferred.peek(), deferred.failed(), deferred.take()) == (None, 0, None)


def test_a_look_keeps_its_report_while_later_failures_come() -> None:
    deferred = DeferredErrors()
    deferred.add_failure(failure("first"))
    report = deferred.peek()
    deferred.add_failure(failure("second"))
    assert texts(report) == ["first"]
    assert texts(deferred.peek()) == ["first", "second"]


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize("log_failures", [True, False])
def test_what_was_warned_of_and_logged_is_not_shown_again(on_error: OnError, log_failures: bool) -> None:
    deferred = DeferredErrors(on_error=on_error, log_failures=log_failures)
    deferred.add_failure(failure("bug"))
    deferred.add_lost("the ring was full", 3)
    found = deferred.peek()
    assert texts(found) == ([] if on_error is OnError.WARN and log_failures else ["bug"])
    assert found is not None
    assert "3 message(s) lost: the ring was full" in str(found.exceptions[-1])
    assert deferred.failed() == 1
    deferred.take()  # also out of the queue of what the next call raises
