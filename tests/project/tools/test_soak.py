"""The long test itself, made short: `tools/soak.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.native_only
def test_a_short_soak_has_no_faults() -> None:
    arguments = ["--minutes", "0.4", "--kills", "5", "--messages", "4e5", "--no-write"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "soak.py"), *arguments],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| faults | 0 |" in done.stdout
    assert "5 processes" in done.stdout
