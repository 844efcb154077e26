"""Where the checkout is, and what a program that a test starts must find."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HELPERS = Path(__file__).parent

REMOTE_HELPERS = ROOT / "tests" / "receiver" / "remote" / "helpers"


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of the folders, the checkout, this folder, and what this process has in its own."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, (*folders, ROOT, HELPERS)), *own])
