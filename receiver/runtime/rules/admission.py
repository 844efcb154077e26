"""What the rules of a tap decide where there is no native handler: the reference of `receiver/native/rules/rule.cc`."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hostcallback.receiver.runtime.rules.rules import DEFAULT, Rule

EVERY_DEVICE = -1
"""In place of a device's id: of shards, whose devices send a value all or none."""

KEPT_DECISIONS = 1 << 20
"""A device may be so many values behind the first one that makes them."""


def interval_ns_of(rule: Rule) -> int:
    """At least how long between two messages; 0 for no limit."""
    return 0 if rule.rate is None else round(1e9 / rule.rate)


def probe_ns_of(rule: Rule) -> int:
    """In how long a closed gate lets one message through; 0: never."""
    return 0 if rule.when is None else round(rule.when.probe_sec * 1e9)


@dataclass(slots=True)
class _DeviceState:
    closed: bool = False
    seen: int = 0
    held: int = 0
    not_before: int = 0
    next_probe: int = 0


class Admission:
    """The rules of one tap and the state that they need, for each device. Any thread."""

    def __init__(self) -> None:
        """Everything is admitted."""
        self.rule = DEFAULT
        self._lock = threading.Lock()  # protects everything below
        self._states: dict[int, _DeviceState] = {}
        self.suppressed = 0

    def set(self, rule: Rule) -> None:
        """The rules from now on. Counting begins anew where they count otherwise than before."""
        with self._lock:
            if _counting(rule) != _counting(self.rule):
                for state in self._states.values():
                    state.seen = state.not_before = 0
            self.rule = rule

    def set_gate(self, device: int, closed: bool) -> None:
        """The predicate's answer for the last value of a device."""
        with self._lock:
            state = self._states.setdefault(device, _DeviceState())
            state.closed, state.held, state.next_probe = closed, 0, 0

    def admit(self, device: int, now_ns: int) -> bool:
        """Whether the message that a device is about to send may be sent. One that may not is counted."""
        with self._lock:
            admitted = self._decide(self._states.setdefault(device, _DeviceState()), now_ns)
            self.suppressed += not admitted
            return admitted

    def count(self, messages: int) -> None:
        """Messages that were withheld after they were sent."""
        with self._lock:
            self.suppressed += messages

    def _decide(self, state: _DeviceState, now_ns: int) -> bool:
        rule = self.rule
        if not rule.enabled:
            return False
        state.seen += 1
        if (state.seen - 1) % rule.every:
            return False
        if rule.when is not None and state.closed and not self._probe(state, now_ns):
            return False
        interval = interval_ns_of(rule)
        # Further ahead than one interval: the clock was set back meanwhile.
        if interval and 0 < state.not_before - now_ns <= interval:
            return False
        state.not_before = now_ns + interval
        return True

    def _probe(self, state: _DeviceState, now_ns: int) -> bool:
        assert self.rule.when is not None
        every, probe_ns = self.rule.when.probe_every, probe_ns_of(self.rule)
        state.held += 1
        in_time = not state.next_probe or 0 < state.next_probe - now_ns <= probe_ns
        due = bool(every and state.held >= every) or bool(probe_ns and not in_time)
        if due:
            state.held = 0
        if due or not state.next_probe:
            state.next_probe = now_ns + probe_ns
        return due


def _counting(rule: Rule) -> tuple[object, ...]:
    when = rule.when
    return (rule.every, rule.rate, None if when is None else (when.probe_every, when.probe_sec))


class Decisions:
    """Which values of one program of shards are sent. The first device to ask decides; the others follow.

    The caller holds a lock of the program.
    """

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._begin = 0
        self._sent = bytearray()

    def of(self, number: int, admission: Admission | None, now_ns: int) -> bool:
        """Whether the value of that number is sent; numbers grow on each device by one."""
        if number == self._begin + len(self._sent):
            if len(self._sent) == KEPT_DECISIONS:
                del self._sent[: KEPT_DECISIONS // 2]
                self._begin += KEPT_DECISIONS // 2
            self._sent.append(admission is None or admission.admit(EVERY_DEVICE, now_ns))
        return number >= self._begin and bool(self._sent[number - self._begin])
