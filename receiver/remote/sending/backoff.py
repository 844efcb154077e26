"""How long to wait before something is tried again: longer each time, and at random, so that not all come at once."""

from __future__ import annotations

import random

FIRST_BACK_OFF_SEC, LAST_BACK_OFF_SEC = 0.1, 10.0

_random = random.Random()  # of its own: the program's may be seeded


class BackOff:
    """The waits of one who tries. One thread."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.reset()

    def reset(self) -> None:
        """It has worked."""
        self._seconds = FIRST_BACK_OFF_SEC

    def next_sec(self) -> float:
        """It has failed: how long to wait now."""
        wait_sec = _random.uniform(0.2, 1.0) * self._seconds
        self._seconds = min(2 * self._seconds, LAST_BACK_OFF_SEC)
        return wait_sec
