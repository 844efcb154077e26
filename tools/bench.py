"""Runs the benchmarks: `python tools/bench.py [--rounds N] [--messages N] [--only TEXT] [--no-write]`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of tools/, which has a folder of this name

from tools.bench.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
