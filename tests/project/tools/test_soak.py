"""The long test itself, made short: `tools/soak.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_process import python_output

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.native_only
def test_a_short_soak_has_no_faults() -> None:
    arguments = ["--minutes", "0.4", "--kills", "5", "--messages", "4e5", "--no-write"]
    printed = python_output(ROOT / "tools" / "soak.py", *arguments, timeout_sec=200)
    assert "| faults | 0 |" in printed
    assert "5 processes" in printed
