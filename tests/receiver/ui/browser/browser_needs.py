"""What tests in a browser do without the browser, or the pages for it."""

from __future__ import annotations

import os
from typing import Any

import pytest

WANTED = os.environ.get("HOSTCALLBACK_TEST_BROWSER") == "required"
"""Set where a missing browser is a failure."""


def missing(text: str) -> Any:
    """Skips the test, or fails it where the browser is required."""
    return pytest.fail(text) if WANTED else pytest.skip(text)
