"""Applies the rules of a tap where no native handler does. Reference of `rules/rule.cc` and `handlers/latest.cc`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver import processes
from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.messages import Consumer, Message, Sink
from hostcallback.receiver.runtime.rules.rules import DEFAULT, Predicate, Rule
from hostcallback.receiver.sinks.sharding.sinks import SHARD_SINKS
from hostcallback.receiver.wire.truncation import cut, head_of

LATEST_BYTES = 64 << 10
"""Larger messages are not kept."""

RETRY_SEC = 0.01
"""Seconds until a message is tried again whose queue has no room."""


class Queue(Protocol):
    """Where messages go; see `QueueSource`."""

    def has_room(self) -> bool:
        """Whether the queue takes a message without waiting."""

    def append(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], time_ns: int) -> None:
        """Appends a message, without waiting for room."""


class Kept(NamedTuple):
    """One message, with copies of its arrays."""

    queue: Queue
    prefix: bytes
    arrays: Sequence[np.ndarray[Any, Any]]
    time_ns: int

    def send(self) -> None:
        """Puts the message into its queue."""
        self.queue.append(self.prefix, self.arrays, self.time_ns)


class Timer:
    """A daemon thread that calls functions at their times. Each returns the seconds until its next call, or None."""

    def __init__(self) -> None:
        """The thread starts with the first call of `at`."""
        self._changed = threading.Condition()  # protects everything below
        self._due: dict[Callable[[], float | None], float] = {}
        self._thread: threading.Thread | None = None

    def at(self, delay_sec: float, function: Callable[[], float | None]) -> None:
        """Has a function called after `delay_sec`, or earlier if it is due earlier."""
        due = time.monotonic() + delay_sec
        with self._changed:
            if self._due.get(function, float("inf")) <= due:
                return
            self._due[function] = due
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hostcallback-latest", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [function for function, at in self._due.items() if at <= now]
                if not due:
                    first = min(self._due.values(), default=None)
                    # A lock waits for at most some centuries.
                    self._changed.wait(None if first is None else min(first - now, 3600.0))
                    continue
                for function in due:
                    del self._due[function]
            # Without the lock: the functions take locks of admissions, whose holders call `at`.
            for function in due:
                delay_sec = function()
                if delay_sec is not None:
                    self.at(delay_sec, function)


timer = Timer()
"""The timer of this process."""

processes.in_child(processes.Stage.RUNTIME, timer.__init__)  # type: ignore[misc]


EVERY_DEVICE = -1
"""Stands for a device's id in sharded taps, whose devices all send a value or all suppress it."""

KEPT_DECISIONS = 1 << 20
"""Number of values that a device may lag behind the fastest device of its program. Older values count as suppressed."""


class Answer(Enum):
    """What happens to a message."""

    SEND = 1
    LEAVE_OUT = 2
    TOO_SOON = 3
    """Only the rate leaves it out: the caller gives it to `Admission.keep`."""


@dataclass(slots=True)
class _DeviceState:
    kept: Kept | None = None
    closed: bool = False
    seen: int = 0
    held: int = 0
    not_before: int = 0
    next_probe: int = 0


class Admission:
    """The rule of one tap with its state per device. Any thread."""

    def __init__(self) -> None:
        """Admits all messages until `set`."""
        self.rule = DEFAULT
        self._lock = threading.Lock()  # protects everything below
        self._states: dict[int, _DeviceState] = {}
        self.suppressed = 0

    def set(self, rule: Rule) -> None:
        """Sets the rule. The counts restart if `every`, `rate` or the probes differ from the earlier rule."""
        with self._lock:
            # A change of `truncate` alone, say, must not make a tap with `every=100` send out of turn.
            if _counting(rule) != _counting(self.rule):
                for state in self._states.values():
                    state.seen = state.not_before = 0
            self.rule = rule

    def after_fork_in_child(self) -> None:
        """Renews the lock, which a thread of the parent may have held. What is kept is the parent's."""
        self._lock = threading.Lock()
        for state in self._states.values():
            state.kept = None

    def set_gate(self, device: int, closed: bool) -> None:
        """Closes or opens the gate of a device, after the predicate's answer for its last value."""
        with self._lock:
            state = self._states.setdefault(device, _DeviceState())
            state.closed, state.held, state.next_probe = closed, 0, 0

    def admit(self, device: int, now_ns: int) -> bool:
        """Whether a device may send its next message. Counts suppressed messages."""
        answer = self.ask(device, now_ns)
        self.count(answer is Answer.TOO_SOON)
        return answer is Answer.SEND

    def ask(self, device: int, now_ns: int) -> Answer:
        """As `admit`, for callers that keep messages that come too soon. A message that is sent replaces a kept one."""
        with self._lock:
            state = self._states.setdefault(device, _DeviceState())
            answer = self._decide(state, now_ns)
            self.suppressed += answer is Answer.LEAVE_OUT
            if answer is Answer.SEND:
                self.suppressed += state.kept is not None
                state.kept = None
            return answer

    def keep(
        self, device: int, queue: Queue, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], now_ns: int
    ) -> None:
        """Keeps a message that came too soon in place of the one before; it is sent if no newer one is.

        Args:
            device: its device.
            queue: where it is sent.
            prefix: header and metadata of the message.
            arrays: its arrays; they are copied.
            now_ns: time of the message.
        """
        with self._lock:
            state = self._states[device]
            # Too large to keep. An older message that is kept stays, and is sent.
            if sum(array.nbytes for array in arrays) > LATEST_BYTES:
                self.suppressed += 1
                return
            self.suppressed += state.kept is not None
            # Copies: the arrays are XLA's memory, which is reused after the callback.
            state.kept = Kept(queue, prefix, [array.copy() for array in arrays], now_ns)
            delay_sec = max(0, state.not_before - now_ns) / 1e9
        timer.at(delay_sec, self._send_due)

    def send_kept(self) -> int:
        """Sends the kept messages of all devices. Returns their number."""
        with self._lock:
            kept = [state for state in self._states.values() if state.kept is not None]
            for state in kept:
                self._send(state, time.time_ns())
            return len(kept)

    def _send_due(self) -> float | None:
        # Sends what may be sent now. Returns the seconds until the next look.
        now_ns = time.time_ns()
        interval, delays = self.rule.interval_ns, []
        with self._lock:
            for state in self._states.values():
                if state.kept is None:
                    continue
                if interval and 0 < state.not_before - now_ns <= interval:
                    delays.append((state.not_before - now_ns) / 1e9)
                elif state.kept.queue.has_room():
                    self._send(state, now_ns)
                else:
                    delays.append(RETRY_SEC)
        return min(delays, default=None)

    def _send(self, state: _DeviceState, now_ns: int) -> None:
        assert state.kept is not None
        state.not_before = now_ns + self.rule.interval_ns
        state.kept.send()  # with the lock: a newer message is not sent before it
        state.kept = None

    def count(self, messages: int) -> None:
        """Adds messages that the gate withheld after they were sent."""
        with self._lock:
            self.suppressed += messages

    def _decide(self, state: _DeviceState, now_ns: int) -> Answer:
        rule = self.rule
        if not rule.enabled:
            return Answer.LEAVE_OUT
        state.seen += 1
        if (state.seen - 1) % rule.every:
            return Answer.LEAVE_OUT
        if rule.when is not None and state.closed and not self._probe(state, now_ns):
            return Answer.LEAVE_OUT
        interval = rule.interval_ns
        # If `not_before` is more than one interval ahead, the clock was set back, and the message passes.
        if interval and 0 < state.not_before - now_ns <= interval:
            return Answer.TOO_SOON
        state.not_before = now_ns + interval
        return Answer.SEND

    def _probe(self, state: _DeviceState, now_ns: int) -> bool:
        assert self.rule.when is not None
        every, probe_ns = self.rule.when.probe_every, self.rule.probe_ns
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
    """Decides which values of a sharded program are sent: the first device to ask decides for all devices.

    The caller holds the lock of the program, so the class has no lock.
    """

    def __init__(self) -> None:
        """Starts at value 0."""
        self._begin = 0
        self._sent = bytearray()

    def of(self, number: int, admission: Admission | None, now_ns: int) -> bool:
        """Whether the value with that number is sent. Each device counts its values from 0."""
        if number == self._begin + len(self._sent):
            # By halves, so that the list is moved once in half a million values.
            if len(self._sent) == KEPT_DECISIONS:
                del self._sent[: KEPT_DECISIONS // 2]
                self._begin += KEPT_DECISIONS // 2
            self._sent.append(admission is None or admission.admit(EVERY_DEVICE, now_ns))
        return number >= self._begin and bool(self._sent[number - self._begin])


SetGate = Callable[[int, bool], None]
"""Function that closes or opens the gate of a device, given by its id or EVERY_DEVICE."""


class GateSink:
    """Passes a message on if the predicate was true for the previous one, then evaluates the predicate on this message.

    Messages that were emitted before the gate closed arrive here, and so do probes. The predicate is asked about all.
    """

    def __init__(
        self,
        sink: Sink,
        predicate: Predicate | None,
        elements: int | None,
        unflatten: Callable[[Sequence[Any]], Any],
        set_gate: SetGate,
        count_withheld: Callable[[int], None],
        *,
        sharded: bool,
    ) -> None:
        """Makes the gate of one tap.

        Args:
            sink: the tap's sink.
            predicate: called with each value; None to hand on all messages.
            elements: number of elements to which arrays are cut; None to leave them whole.
            unflatten: makes the value from a message's arrays.
            set_gate: called when the predicate's answer for a device changes.
            count_withheld: called with the number of messages that are not handed on.
            sharded: whether the devices send shards of common values.
        """
        self.sink = sink
        self.predicate = predicate
        self.elements = elements
        self._unflatten = unflatten
        self._set_gate = set_gate
        self._count_withheld = count_withheld
        self._sharded = sharded
        self._lock = threading.Lock()  # protects `_open`
        self._open: dict[int, bool] = {}

    def __call__(self, message: Message) -> Any:
        """Consumes one message.

        Raises:
            BaseException: the exception of the sink or of the predicate. A predicate that raises counts as true.
        """
        if self.elements is not None:
            arrays = [_head(array, self.elements) for array in message.arrays]
            message = message._replace(arrays=arrays)
        if self.predicate is None:
            return self.sink(message)
        device = EVERY_DEVICE if self._sharded else getattr(message.device, "id", EVERY_DEVICE)
        holds, failure = self._ask(message)
        with self._lock:
            before = self._open.get(device)
            self._open[device] = holds
        # Without the lock, since it takes the locks of the admission and of the native table.
        if before is not holds:
            self._set_gate(device, not holds)
        passes = before is not False
        if not passes:
            self._count_withheld(message.stacked or 1)
        if failure is None:
            return self.sink(message) if passes else None
        try:
            if passes:
                self.sink(message)
        except BaseException as error:
            raise MultipleFailures("the sink and the predicate of the tap raised", [error, failure]) from None
        raise failure

    def follow(self, earlier: GateSink) -> None:
        """Takes over the gates of an earlier GateSink if the predicate is the same; else opens them."""
        with earlier._lock:
            known = dict(earlier._open)
        if self.predicate is earlier.predicate:
            self._open = known
        else:
            earlier.open_gates()

    def open_gates(self) -> None:
        """Opens all gates, because the predicate does not apply any more."""
        for device in list(self._open):
            self._set_gate(device, False)

    def _ask(self, message: Message) -> tuple[bool, BaseException | None]:
        assert self.predicate is not None
        try:
            return bool(self.predicate(self._unflatten(message.arrays))), None
        except BaseException as error:  # a failing predicate must not withhold the message
            error.add_note("raised by the predicate of the tap's rule `when`")
            return True, error


def _head(array: Any, elements: int) -> Any:
    head = cut(array, elements)
    return array if head is array else head_of(head, array.shape)


def install_gate(
    consumer: Consumer, rule: Rule, set_gate: SetGate, count_withheld: Callable[[int], None]
) -> None:
    """Puts a GateSink before the consumer's sink if the rule needs one, and removes one that is not needed."""
    sink = consumer.sink
    sharded = isinstance(sink, SHARD_SINKS)
    # The gate of a sharded tap stands behind the assembly, because the rule looks at whole values.
    place: Any = sink if sharded else consumer
    present = place.sink if isinstance(place.sink, GateSink) else None
    predicate = None if rule.when is None else rule.when.predicate
    elements = rule.truncate if sharded else None
    wanted = (predicate, elements)
    if wanted == ((None, None) if present is None else (present.predicate, present.elements)):
        return
    own = place.sink if present is None else present.sink
    if wanted == (None, None):
        place.sink = own
        if present is not None:
            present.open_gates()
        return
    front = GateSink(own, predicate, elements, consumer.unflatten, set_gate, count_withheld, sharded=sharded)
    if present is not None:
        front.follow(present)
    place.sink = front
