"""A counter whose names come from outside: it keeps a limited number of them, and counts all others together."""

from __future__ import annotations

from collections import Counter

from hostcallback.receiver import limits

OTHERS = "others"


class BoundedCounter(Counter[str]):
    """Counts by name, up to `limits.COUNTED_NAMES` names. Further names count as `OTHERS`. The total is exact."""

    def __setitem__(self, name: str, count: int) -> None:
        """Sets the count of a name; that of a name too many is added to `OTHERS`."""
        if name not in self and len(self) >= limits.COUNTED_NAMES:
            name, count = OTHERS, self[OTHERS] + count
        super().__setitem__(name, count)
