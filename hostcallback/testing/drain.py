"""Waits for the taps of a test, and blames it for their failures."""

from __future__ import annotations

import traceback

import pytest

from hostcallback.api.barrier import barrier_wait
from hostcallback.receiver.errors import TapFunctionException, TapTimeoutError


def drain_before(item: pytest.Item) -> None:
    """Waits for taps that ran outside of any test.

    Raises:
        TapFunctionException: with a note that another part of the test session tapped.
    """
    try:
        barrier_wait(_limit(item))
    except TapFunctionException as error:
        error.add_note("These taps ran before this test, outside of any test: while modules were imported.")
        raise


def drain(item: pytest.Item, when: str, error: BaseException | None) -> None:
    """Waits for the taps of one phase of a test.

    Args:
        item: the test.
        when: the phase: setup, call or teardown.
        error: the phase's own exception, which stays the reason of its failure.

    Raises:
        TapFunctionException: taps failed, and the phase did not.
        TapTimeoutError: they take longer than the ini option `hostcallback_timeout`.
    """
    try:
        barrier_wait(_limit(item))
    except (TapFunctionException, TapTimeoutError) as failed:
        if error is None or isinstance(error, pytest.skip.Exception):
            raise
        errors = failed.exceptions if isinstance(failed, TapFunctionException) else [failed]
        text = "\n".join("".join(traceback.format_exception(each)) for each in errors)
        item.add_report_section(when, "failed taps", text)


def _limit(item: pytest.Item) -> float | None:
    text = item.config.getini("hostcallback_timeout")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise pytest.UsageError(
            f"the ini option hostcallback_timeout is {text!r}, expected seconds, 0 or more"
        )
    return seconds or None
