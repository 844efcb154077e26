"""A replay at a speed: messages are handed on in the time that lay between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hostcallback.receiver.replayer import log_delivery
from hostcallback.receiver.replayer.log_delivery import Pace

SECOND = 10**9
TIMES = [10 * SECOND, 10 * SECOND, 12 * SECOND, 13 * SECOND, 13 * SECOND, 20 * SECOND]


class Clock:
    """Stands for the module `time`: sleeps take no time of the test, but `late` seconds too long."""

    def __init__(self) -> None:
        self.now = 100.0
        self.late = 0.0
        self.module: Any = SimpleNamespace(perf_counter=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(log_delivery, "time", found.module)
    return found


def handed_on(
    clock: Clock, pace: Pace, start: int = 0, stop: int = len(TIMES)
) -> list[tuple[float, int, int]]:
    """The seconds after which messages are due, and their range."""
    return [(round(clock.now - 100, 6), *part) for part in pace.parts(TIMES, start, stop)]


@pytest.mark.parametrize("speed", [1.0, 0.5, 4.0])
def test_messages_are_due_as_long_after_the_first_as_they_were(clock: Clock, speed: float) -> None:
    due = [(0, 0, 2), (2, 2, 3), (3, 3, 5), (10, 5, 6)]
    assert handed_on(clock, Pace(speed)) == [(after / speed, *part) for after, *part in due]


def test_what_became_due_meanwhile_is_handed_on_together(clock: Clock) -> None:
    clock.late = 1.5
    assert handed_on(clock, Pace(1.0)) == [(0, 0, 2), (3.5, 2, 5), (11.5, 5, 6)]


def test_a_later_run_of_messages_keeps_the_clock_of_the_first(clock: Clock) -> None:
    pace = Pace(1.0)
    assert handed_on(clock, pace, stop=3) == [(0, 0, 2), (2, 2, 3)]
    clock.now += 5
    assert handed_on(clock, pace, 3) == [(7, 3, 5), (10, 5, 6)]
