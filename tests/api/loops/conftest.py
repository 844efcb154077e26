"""Bars as in a terminal of fixed width."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the width of a terminal."""
    monkeypatch.setenv("COLUMNS", "100")
