"""A fresh recorder for each test of transformations."""

from __future__ import annotations

import pytest

from recorder import Recorder


@pytest.fixture
def rec() -> Recorder:
    """A tap function that keeps its arguments."""
    return Recorder()
