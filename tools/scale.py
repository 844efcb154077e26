"""Measures at scale: `python tools/scale.py messages --count 1e9`, `python tools/scale.py senders --clients 8,32`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of tools/, which has a folder of this name

from tools.scale.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
