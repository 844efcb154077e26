"""The rules of a tap where Python carries them out, one message at a time: as the native library does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.runtime.rules import admission as admissions
from hostcallback.receiver.runtime.rules.admission import Admission, Decisions, Timer
from hostcallback.receiver.runtime.rules.rules import OFF, Rule, When
from threads import WAIT_SEC, wait_for

SECOND = 10**9
HOUR = 3600 * SECOND
START = 10**18


class Tap:
    """One tap, whose messages count upwards. `sent` has those that were sent, by device."""

    def __init__(self, rule: Rule) -> None:
        self.admission = Admission()
        self.admission.set(rule)
        self.count = 0

    def emit(self, count: int, now_ns: int = START, device: int = 0) -> list[int]:
        """Emits messages at a time; the numbers of those that are sent."""
        first, self.count = self.count, self.count + count
        return [number for number in range(first, self.count) if self.admission.admit(device, now_ns)]


class Room:
    """A queue that has room."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.is_full = False

    def has_room(self) -> bool:
        return not self.is_full

    def append(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], time_ns: int) -> None:
        self.values.append(float(arrays[0][0]))


def when(every: int = 0, sec: float = 0.0) -> Rule:
    return Rule(when=When(lambda value: True, every, sec))


def test_every_nth_is_sent_from_the_first_on_and_the_same_rule_goes_on_counting() -> None:
    tap = Tap(Rule(every=4))
    assert tap.emit(10) == [0, 4, 8]
    assert tap.admission.suppressed == 7
    tap.admission.set(Rule(every=4, truncate=3))
    assert tap.emit(2) == []
    tap.admission.set(Rule(every=3))
    assert tap.emit(4) == [12, 15]
    tap.admission.set(OFF)
    assert tap.emit(2) == []
    tap.admission.set(Rule())
    assert tap.emit(2) == [18, 19]
    assert tap.admission.suppressed == 7 + 2 + 2 + 2


def test_each_device_counts_for_itself() -> None:
    tap = Tap(Rule(every=3))
    assert [tap.emit(1, device=device) for device in (0, 1, 0, 1, 0, 0, 1, 1)] == [
        [0], [1], [], [], [], [5], [], [7]
    ]  # fmt: skip


def test_a_rate_sends_one_message_in_its_time_and_goes_on_if_the_clock_was_set_back() -> None:
    tap = Tap(Rule(rate=1.0))
    assert tap.emit(5) == [0]
    assert tap.emit(5, START + SECOND - 1) == []
    assert tap.emit(5, START + SECOND) == [10]
    assert tap.emit(5, START - HOUR) == [15]
    assert tap.admission.suppressed == 4 + 5 + 4 + 4


def test_a_closed_gate_lets_probes_through_by_number() -> None:
    tap = Tap(when(every=5))
    assert tap.emit(2) == [0, 1]
    tap.admission.set_gate(0, True)
    assert tap.emit(11) == [6, 11]
    tap.admission.set_gate(1, False)
    assert tap.emit(1) == [], "the gate of another device"
    tap.admission.set_gate(0, False)
    assert tap.emit(2) == [14, 15]


def test_a_closed_gate_lets_probes_through_by_time() -> None:
    tap = Tap(when(sec=1.0))
    tap.admission.set_gate(0, True)
    assert tap.emit(3) == []
    assert tap.emit(3, START + SECOND - 1) == []
    assert tap.emit(3, START + SECOND) == [6]
    assert tap.emit(3, START - HOUR) == [9], "the clock was set back"


@pytest.fixture
def due(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds after which kept messages were to be looked at; nothing looks at them here."""
    found: list[float] = []
    monkeypatch.setattr(admissions.timer, "at", lambda delay_sec, function: found.append(delay_sec))
    return found


def kept(admission: Admission, room: Room, *values: float, now_ns: int = START) -> None:
    """Emits messages; those that only the rate leaves out are kept."""
    for value in values:
        if admission.ask(0, now_ns) is admissions.Answer.TOO_SOON:
            admission.keep(0, room, b"", [np.array([value])], now_ns)
        else:
            room.append(b"", [np.array([value])], now_ns)


def test_of_the_messages_that_a_rate_leaves_out_the_latest_is_sent_later(due: list[float]) -> None:
    admission, room = Tap(Rule(rate=0.5)).admission, Room()
    kept(admission, room, 1.0, 2.0, 3.0, now_ns=START)
    assert (room.values, due, admission.suppressed) == ([1.0], [2.0, 2.0], 1)
    assert admission.send_kept() == 1
    assert admission.send_kept() == 0
    assert (room.values, admission.suppressed) == ([1.0, 3.0], 1)


def test_a_message_that_is_sent_takes_the_place_of_the_kept_one(due: list[float]) -> None:
    admission, room = Tap(Rule(rate=1.0)).admission, Room()
    kept(admission, room, 1.0, 2.0)
    kept(admission, room, 3.0, now_ns=START + SECOND)
    assert (admission.send_kept(), room.values, admission.suppressed) == (0, [1.0, 3.0], 1)


def test_a_message_that_is_too_large_to_be_kept_leaves_the_one_before(due: list[float]) -> None:
    admission, room = Tap(Rule(rate=1.0)).admission, Room()
    kept(admission, room, 1.0, 2.0)
    large = np.zeros(admissions.LATEST_BYTES // 8 + 1)
    assert admission.ask(0, START) is admissions.Answer.TOO_SOON
    admission.keep(0, room, b"", [large], START)
    assert (admission.send_kept(), room.values, admission.suppressed) == (1, [1.0, 2.0], 1)


def test_what_is_due_is_sent_once_its_queue_has_room(due: list[float]) -> None:
    admission, room = Tap(Rule(rate=1.0)).admission, Room()
    kept(admission, room, 1.0, 2.0)  # years ago
    room.is_full = True
    assert admission._send_due() == admissions.RETRY_SEC
    room.is_full = False
    assert admission._send_due() is None
    assert (room.values, admission._send_due()) == ([1.0, 2.0], None)


def test_a_kept_message_is_a_copy(due: list[float]) -> None:
    room, array = Room(), np.array([1.0])
    admission = Tap(Rule(rate=1e-6)).admission
    admission.admit(0, START)
    admission.keep(0, room, b"", [array], START)
    array[0] = 2.0
    admission.send_kept()
    assert room.values == [1.0]


def test_the_first_device_decides_about_a_value_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "KEPT_DECISIONS", 4)
    decisions, admission = Decisions(), Tap(Rule(every=2)).admission
    assert [decisions.of(number, admission, START) for number in range(6)] == [True, False] * 3
    assert [decisions.of(number, admission, START) for number in range(2, 6)] == [True, False] * 2
    assert not decisions.of(0, admission, START), "it is too far behind"
    assert decisions.of(6, None, START)
    assert admission.suppressed == 3


def test_a_timer_calls_functions_when_they_are_due_and_as_often_as_they_ask() -> None:
    timer, called = Timer(), list[str]()

    def thrice() -> float | None:
        called.append("thrice")
        return 0.001 if called.count("thrice") < 3 else None

    def once() -> None:
        called.append("once")

    timer.at(2 * WAIT_SEC, once)
    timer.at(0.0, thrice)
    wait_for(lambda: len(called) == 3, "the calls of a function that asks for more")
    assert called == ["thrice"] * 3
    timer.at(0.0, once)  # earlier than it was due
    wait_for(lambda: len(called) == 4, "the call of the other one")
    timer.at(0.0, thrice)
    wait_for(lambda: len(called) == 5, "one more call")
    assert called[3:] == ["once", "thrice"]
    assert not timer._due


def test_a_function_that_is_due_earlier_is_not_put_off() -> None:
    timer, called = Timer(), list[int]()
    timer.at(0.05, lambda: called.append(0))
    (waiting,) = timer._due
    timer.at(2 * WAIT_SEC, waiting)
    wait_for(lambda: called == [0], "the call at the earlier time")
