"""What programs read of a cell on the callback transport: every device of a launch the same value."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from hostcallback.receiver.runtime.cells import CallbackReads


class Changing:
    """A cell, whose value a test changes, and its reads by some devices."""

    def __init__(self, devices: int) -> None:
        self.value = 0.0
        self.counted = 0
        cell: Any = SimpleNamespace(lock=threading.RLock(), state=self._state)
        self._reads = CallbackReads(cell, devices)

    def _state(self, *, counts: bool = False) -> tuple[np.ndarray[Any, Any], int]:
        self.counted += counts
        return np.array(self.value), self.counted

    def read(self, *devices: int) -> list[float]:
        return [float(self._reads.of(device)) for device in devices]


def test_devices_that_are_behind_read_what_the_first_has_read() -> None:
    cell = Changing(3)
    assert cell.read(0) == [0.0]
    cell.value = 1.0
    assert cell.read(1, 0) == [0.0, 1.0]
    cell.value = 2.0
    assert cell.read(0, 2, 2) == [2.0, 0.0, 1.0]
    assert cell.read(1, 1, 2) == [1.0, 2.0, 2.0]
    assert cell.read(2, 1, 0) == [2.0, 2.0, 2.0]
    assert cell.counted == 4, "a launch reads once"


def test_only_changes_that_a_device_may_still_read_are_kept() -> None:
    cell = Changing(2)
    for value in range(10):
        cell.value = float(value)
        assert cell.read(0, 0) == [value, value]
    assert len(cell._reads._decisions) == 10
    for value in range(10):
        assert cell.read(1, 1) == [value, value]
    assert len(cell._reads._decisions) == 1


def test_a_device_that_is_too_far_behind_reads_the_oldest_value_that_is_kept() -> None:
    cell = Changing(2)
    cell._reads._decisions = deque(maxlen=4)
    for value in range(10):
        cell.value = float(value)
        cell.read(0)
    assert cell.read(*[1] * 10) == [6, 6, 6, 6, 6, 6, 6, 7, 8, 9]
