"""Fixtures for tests of printing."""

from __future__ import annotations

import pytest
from printing import Printed


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capsys)
