"""The sink that rules put in front of a tap's own: for the predicate of `when`, and for heads of assembled values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hostcallback.receiver.messages.deferred_errors import MultipleFailures
from hostcallback.receiver.messages.message import Consumer, Message, Sink
from hostcallback.receiver.runtime.rules.admission import EVERY_DEVICE
from hostcallback.receiver.runtime.rules.rules import Predicate, Rule
from hostcallback.receiver.sinks.sharding.sinks import SHARD_SINKS
from hostcallback.receiver.wire.truncation import cut, head_of

SetGate = Callable[[int, bool], None]
"""Tells the handlers of a device, by its id or EVERY_DEVICE, whether the gate is closed there."""


class GateSink:
    """Hands a message on if the predicate held for the one before it, and asks it about this one.

    What is already on its way when the gate closes arrives here, and so do probes: the predicate is asked about all.
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
        """Makes the front of one tap.

        Args:
            sink: the tap's own.
            predicate: called with each value; None for none.
            elements: what arrays are cut to; None for nothing.
            unflatten: makes the value from a message's arrays.
            set_gate: told what the predicate answered, where that has changed.
            count_withheld: told of messages that are not handed on.
            sharded: whether the devices send the shards of common values.
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
            BaseException: what the sink or the predicate raised; a predicate that raises is taken to hold.
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
            raise MultipleFailures("the predicate of the tap raised besides", [error, failure]) from None
        raise failure

    def follow(self, earlier: GateSink) -> None:
        """Takes over from the front that was there; another predicate begins with open gates."""
        with earlier._lock:
            known = dict(earlier._open)
        if self.predicate is earlier.predicate:
            self._open = known
        else:
            earlier.open_gates()

    def open_gates(self) -> None:
        """The predicate does not count any more."""
        for device in list(self._open):
            self._set_gate(device, False)

    def _ask(self, message: Message) -> tuple[bool, BaseException | None]:
        assert self.predicate is not None
        try:
            return bool(self.predicate(self._unflatten(message.arrays))), None
        except BaseException as error:  # whatever it is, the message has its turn
            error.add_note("raised by the predicate of the tap's rule `when`")
            return True, error


def _head(array: Any, elements: int) -> Any:
    head = cut(array, elements)
    return array if head is array else head_of(head, array.shape)


def install_gate(
    consumer: Consumer, rule: Rule, set_gate: SetGate, count_withheld: Callable[[int], None]
) -> None:
    """Puts what the rule needs in front of the consumer's sink, or takes away what it does not need any more."""
    sink = consumer.sink
    sharded = isinstance(sink, SHARD_SINKS)
    # Of shards it is the value that they make which is looked at.
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
