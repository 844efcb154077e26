"""Counts different items in bounded memory, by linear counting (Whang, Vander-Zanden and Taylor, 1990)."""

from __future__ import annotations

import math
from collections.abc import Hashable

BITS = 1 << 23
"""In one mebibyte. A million items are counted to within about 0.1 %, few items almost always exactly."""


class DistinctCounter:
    """Counts different items. One thread."""

    def __init__(self) -> None:
        """There are none yet."""
        self._bits = bytearray()
        self._set = 0

    def add(self, item: Hashable) -> None:
        """Counts an item, if it is new."""
        if not self._bits:
            self._bits = bytearray(BITS // 8)
        place = hash(item) % BITS
        if not self._bits[place >> 3] >> (place & 7) & 1:
            self._bits[place >> 3] |= 1 << (place & 7)
            self._set += 1

    @property
    def count(self) -> int:
        """About how many there are: of more than 100 million, that many."""
        free = max(1 - self._set / BITS, 1 / BITS)
        return round(-BITS * math.log(free))
