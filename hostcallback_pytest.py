"""The pytest plugin of hostcallback: its hooks, which import nothing of hostcallback until a test has used it.

It is a module beside the package, because importing the package would change JAX in test suites that never use it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from typing import Any

import pytest

USED = "hostcallback.api.barrier"
"""Loaded as soon as anything of hostcallback can tap."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the ini option for the wait after a test."""
    parser.addini(
        "hostcallback_timeout", "seconds that a test's taps may take after it, 0 for no limit", default="0"
    )


def _testing() -> Any:
    return importlib.import_module("hostcallback.testing")


def _run(item: pytest.Item, when: str) -> Generator[None, object, object]:
    """Runs one phase of a test, then waits for its taps and raises their failures."""
    error: BaseException | None = None
    result: object = None
    try:
        result = yield
    except BaseException as raised:
        error = raised
    if USED in sys.modules and not isinstance(error, KeyboardInterrupt):
        _testing().drain(item, when, error)
    if error is not None:
        raise error
    return result


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper: what taps print belongs to the test
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Waits for taps from before the test, then runs its fixtures."""
    if USED in sys.modules:
        _testing().drain_before(item)
    return (yield from _run(item, "setup"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Runs the test and waits for its taps."""
    return (yield from _run(item, "call"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the fixtures and waits for their taps."""
    return (yield from _run(item, "teardown"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows failed checks and taps by the user's lines."""
    report = yield
    if USED in sys.modules and call.excinfo is not None and report.outcome == "failed":
        shown = _testing().shown(item, call.excinfo)
        if shown is not None:
            report.longrepr = shown
    return report


@pytest.fixture
def taps() -> Generator[Any, None, None]:
    """The messages of all taps during the test, by the tap's name: see docs/pytest.md."""
    with _testing().CapturedTaps() as captured:
        yield captured
