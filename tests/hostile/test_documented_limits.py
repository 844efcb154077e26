"""docs/security.md has the limits of receiver/limits.py."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_has_the_limits() -> None:
    documented = runpy.run_path(str(ROOT / "tools" / "documents" / "limits.py"))["documented"]
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert documented(text) == text, "run python tools/documents/limits.py"
