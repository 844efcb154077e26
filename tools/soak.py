"""Runs a long test with kills: `python tools/soak.py [--messages N] [--kills N] [--minutes N] [--seed N]`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of tools/, which has a folder of this name

from tools.soak.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
