"""Fixtures for tests of sinks: a process that receives, and threads that switch often."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from exported_process import Process


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Threads that take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
