"""One delivered message, as sinks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from receiver.messages.consumer import Consumer


Index = tuple[tuple[slice, ...], ...]
"""For each array, where it lies in the whole: a slice per dimension."""


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
