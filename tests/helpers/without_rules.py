"""A fixture for folders whose tests each begin and end without rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hostcallback as hcb


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    yield
    hcb.taps["*"].reset()
