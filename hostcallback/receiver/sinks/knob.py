"""Changes of knobs as messages: their description, their arrays, and the sink that tells readers of logs their text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import KNOB, TapDescriptor

START = "start"
"""Stands for who changed a value where a log begins: it has the value then."""

_LEAVES = ("new", "old", "step")
_PREFIX = "knob/"
CHANGES = f"{_PREFIX}*"
"""Matches the names of the taps whose messages are changes of knobs."""


class KnobChange(NamedTuple):
    """One change of a knob.

    Attributes:
        new: the value from now on.
        old: the value before.
        step: how often programs have read the knob before the change applies.
    """

    new: Array
    old: Array
    step: Array

    @classmethod
    def of(cls, old: Array, new: Array, step: int) -> KnobChange:
        """Makes a change from arrays of the knob's type."""
        return cls(np.asarray(new), np.asarray(old), np.asarray(step, np.int64))


def describe_change(name: str, line: str, who: str) -> TapDescriptor:
    """Describes the messages about changes by `who` of one knob, which was declared at a line."""
    digest = hashlib.blake2b("\0".join((_PREFIX, name, line, who)).encode(), digest_size=8)
    leaves = [["array"] for _ in _LEAVES]
    return TapDescriptor(
        name=_PREFIX + name,
        source_line=line,
        consumer_id=int.from_bytes(digest.digest(), "little") or 1,
        kind=KNOB.text,
        params={"who": who},  # no keyword argument: a change and its replay are alike
        kwargs={},
        transforms=(),
        tree=["dict", [["value", leaf] for leaf in _LEAVES], leaves],
        shards=None,
        sharding="global",
    )


def knob_of(described: TapDescriptor) -> str | None:
    """The name of the knob whose changes are described; None for other taps."""
    if described.tap_kind is not KNOB or not described.name.startswith(_PREFIX):
        return None
    return described.name.removeprefix(_PREFIX)


class KnobSink:
    """Takes the changes of knobs. They are for logs, and nothing else happens to them."""

    def __init__(self, who: Any, unflatten: Unflatten) -> None:
        """Makes the sink of the changes by `who`."""
        self._who = str(who)[:80]
        self._unflatten = unflatten

    def __call__(self, message: Message) -> None:
        """Does nothing."""

    def texts(self, message: Message) -> Sequence[str]:
        """The change as one text, such as `lr: 0.001 -> 0.0003 before read 1200 (hcb ctl)`."""
        change, name = self._unflatten(message.arrays), message.consumer.name.removeprefix(_PREFIX)
        old, new, step = (_shown(change[leaf]) for leaf in ("old", "new", "step"))
        if self._who == START:
            return [f"{name} is {new} after {step} reads"]
        return [f"{name}: {old} -> {new} before read {step} ({self._who})"]


def _shown(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=8, separator=", ")
