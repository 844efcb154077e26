"""The sink that rules put before a tap's sink: asks the predicate of `when` and truncates assembled values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.messages import Consumer, Message, Sink
from hostcallback.receiver.runtime.rules.admission import EVERY_DEVICE
from hostcallback.receiver.runtime.rules.rules import Predicate, Rule
from hostcallback.receiver.sinks.sharding.sinks import SHARD_SINKS
from hostcallback.receiver.wire.truncation import cut, head_of

SetGate = Callable[[int, bool], None]
"""Function that closes or opens the gate of a device, given by its id or EVERY_DEVICE."""


class GateSink:
    """Hands a message on if the predicate held for the message before it, and asks the predicate about this one.

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
