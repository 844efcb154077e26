"""Runs the GPU conformance programs: `python tools/gpu_check.py [--rounds N] [--write]`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of tools/

from tools.gpu.check import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
