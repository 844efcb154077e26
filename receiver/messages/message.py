"""One delivered message, as sinks see it, and the consumer that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from receiver.wire.tap_descriptor import TapDescriptor

Index = tuple[tuple[slice, ...], ...]
"""For each array, where it lies in the whole: a slice per dimension."""


Sink = Callable[["Message"], Any]
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
    describe: Callable[[], TapDescriptor] | None = None
    unflatten: Callable[[Sequence[Any]], Any] = list


class Message(NamedTuple):
    """What one tap emitted on one device.

    Attributes:
        consumer: who the message is for.
        arrays: the tapped leaves in tree order; fresh, writable arrays that the sink may keep.
        seq: sequence number on this device; a gap means dropped messages.
        time_ns: Unix time of the emission in nanoseconds.
        run_id: equal on all devices of one launch of one program.
        device: the device, as the trace-time side names it (a `jax.Device`), or a text.
        shard_index: where `arrays` lie in the whole arrays that a compiler partitioned; None if they are whole.
        stacked: how many messages of a consumer that takes stacks the arrays are made of, along a new first axis; the
            other numbers are those of the last. 0 for one message as it is.
    """

    consumer: Consumer
    arrays: Sequence[np.ndarray[Any, Any]]
    seq: int
    time_ns: int
    run_id: int
    device: Any
    shard_index: Index | None
    stacked: int = 0
