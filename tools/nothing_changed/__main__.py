"""`python -m tools.nothing_changed`."""

import sys

from tools.nothing_changed.run import main

if __name__ == "__main__":
    sys.exit(main())
