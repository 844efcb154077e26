"""Delivered messages, as sinks receive them, and their consumers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

Index = tuple[tuple[slice, ...], ...]
"""For each array, its place in the whole array: a slice per dimension."""


Sink = Callable[["Message"], Any]
"""Consumes messages; the sink of a call returns its results, a list of arrays. Called on the receiver thread of the
message's device, one message at a time per device and in order; several devices call it concurrently. Its exceptions
are deferred."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Consumer:
    """The consumer of the messages with one consumer id.

    Attributes:
        consumer_id: 64 bits, deterministic across processes.
        name: the tap function's name, for users.
        source_line: `file:line (function)` of the user's tap call.
        sink: consumes the messages. Live control may change it, to put a gate sink before it.
        transforms: the transformations applied to the tap, outermost last.
        kwargs: the tap's keyword arguments, for reports.
        is_check: whether its messages are failures of a check.
        is_portable: whether any process that has its descriptor can deliver its messages as this one would.
        devices: number of this process's devices that send each of its messages, as of the programs traced so far.
            Only this number and `sink` change.
        is_switchable: whether it is a tap of this process that can be switched off by name.
        own_rate: largest number of messages per second and device, 0 for no limit. Rules can then only switch the
            consumer off and on: the last message of a progress bar must not be left out. None for the rules.
        describe: returns the descriptor for a process that has not traced the tap; None if the consumer is not a tap.
            Raises ValueError if the tap cannot be described.
        unflatten: restores the tapped value from the arrays of a message.
        origin: what belongs to the one program that the tap is in, if its taps are told apart from those of others;
            None if they are not.
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
    own_rate: float | None = None
    devices: int = 1
    describe: Callable[[], TapDescriptor] | None = None
    unflatten: Callable[[Sequence[Any]], Any] = list
    origin: Any = None


class Message(NamedTuple):
    """One message: the arrays that a tap emitted on one device.

    Attributes:
        consumer: the message's consumer.
        arrays: the tapped leaves in tree order, with the shapes and dtypes of the traced values (of typed keys, their
            uint32 data); fresh, writable arrays that the sink may keep.
        seq: sequence number on this device; a gap means dropped messages.
        time_ns: Unix time of the emission in nanoseconds.
        run_id: equal on all devices of one launch of one program.
        device: the device, as the tracing side names it (a `jax.Device`), or a text.
        shard_index: places of `arrays` in the whole arrays that a compiler partitioned; None if they are whole.
        stacked: number of messages that the arrays are stacks of, along a new first axis, for a consumer that takes
            stacks; the other numbers are those of the last message. 0 for a single message.
        elements: of a tap in a branch or loop that vmap runs for all elements, the places in the whole batch of those
            that take part and are here: an array for each vmap over which that differs, the outermost first. None for
            every other tap.

    Example:
        with hcb.outfeed_receiver(sinks=[lambda message: print(message.consumer.name, message.arrays)]):
            train()
    """

    consumer: Consumer
    arrays: Sequence[np.ndarray[Any, Any]]
    seq: int
    time_ns: int
    run_id: int
    device: Any
    shard_index: Index | None
    stacked: int = 0
    elements: tuple[np.ndarray[Any, Any], ...] | None = None
