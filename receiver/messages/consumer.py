"""A consumer: the sink that a consumer id stands for, and how to describe it in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from receiver.messages.message import Message
from receiver.wire.tap_descriptor import Described

Sink = Callable[[Message], Any]
"""Consumes messages; that of a call returns its results, a list of arrays. Called on the receiver thread of the
message's device, one message at a time per device and in order; several devices call it concurrently. What it raises is
deferred."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Consumer:
    """What messages with one consumer id are delivered to.

    Attributes:
        consumer_id: 64 bits, deterministic across processes.
        name: the tap function's name, for people.
        source_line: `file:line (function)` of the user's tap call.
        sink: consumes the messages. The only attribute that changes: live control may put a sink before it.
        transforms: the transformations applied to the tap, outermost last.
        kwargs: the tap's keyword arguments, for reports.
        is_check: whether its messages are failures of a check.
        is_portable: whether any process that has its description can deliver its messages as this one would.
        is_switchable: whether it is a tap of this process that can be switched off by name.
        describe: what a process that has not traced the tap has to know of it; None for what is no tap. Raises
            ValueError where it cannot be told.
        unflatten: makes the tapped value from the arrays of a message.
    """

    consumer_id: int
    name: str
    source_line: str
    sink: Sink
    transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_check: bool = False
    is_switchable: bool = False
    is_portable: bool = False
    describe: Callable[[], Described] | None = None
    unflatten: Callable[[Sequence[Any]], Any] = list
