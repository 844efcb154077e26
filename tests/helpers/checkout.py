"""Paths of the checkout, and the PYTHONPATH for programs that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HELPERS = Path(__file__).parent

REMOTE_HELPERS = ROOT / "tests" / "receiver" / "remote" / "helpers"


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of the folders, the checkout, this folder, and this process's PYTHONPATH."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, (*folders, ROOT, HELPERS)), *own])
