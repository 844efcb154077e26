"""A new recorder for each test of taps."""

from __future__ import annotations

import pytest

from recorder import Recorder


@pytest.fixture
def rec() -> Recorder:
    return Recorder()
