"""Forwarding tests name their run, except for the tests of the default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def a_named_run() -> Iterator[None]:
    """The processes of a test, and those that it restarts, belong to the run `run`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTCALLBACK_RUN", "run")
        yield
