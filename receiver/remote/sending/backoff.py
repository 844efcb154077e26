"""Waiting times between attempts: growing, and random, so that many clients do not reconnect at the same time."""

from __future__ import annotations

import random

FIRST_BACK_OFF_SEC, LAST_BACK_OFF_SEC = 0.1, 10.0

_random = random.Random()  # separate from the program's generator, which may be seeded


class BackOff:
    """The waiting times of one client. One thread."""

    def __init__(self) -> None:
        """No attempt has failed yet."""
        self.reset()

    def reset(self) -> None:
        """Starts again with the shortest time: an attempt has succeeded."""
        self._seconds = FIRST_BACK_OFF_SEC

    def next_sec(self) -> float:
        """Seconds to wait after a failed attempt."""
        wait_sec = _random.uniform(0.2, 1.0) * self._seconds
        self._seconds = min(2 * self._seconds, LAST_BACK_OFF_SEC)
        return wait_sec
