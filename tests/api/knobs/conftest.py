"""Each test has its own knobs: a name that no other test has."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """The name of a knob that exists in no other test of the process."""
    return f"lr{next(_numbers)}"


@pytest.fixture
def fresh() -> Callable[[], str]:
    """Returns a new name at each call."""
    return lambda: f"other{next(_numbers)}"
