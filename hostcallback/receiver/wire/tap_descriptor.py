"""Descriptions of taps for processes that have not traced them: their kinds and descriptors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.wire import pytree, pytree as tree


@dataclass(frozen=True, slots=True)
class TapKind:
    """What a tap is for. Descriptors, tap logs and messages of exported programs hold its `text`.

    The defaults are those of a kind that this version does not know: its messages are values.

    Attributes:
        text: the name of the kind in descriptors and files.
        is_check: whether the first array is a predicate, a message is sent only where it does not hold, and messages
            are failures.
        folds: whether of a check's failures in a row only the first ones and the last need be read.
        prints: whether a message is printed or logged where no function takes it.
        is_text: whether readers of logs and streams show a message as text, in place of its value.
        has_metrics: whether numbers in its messages are metrics.
        has_arguments: whether its value is `(args, kwargs)`, with the predicate of a check before them.
        by_element: whether its sink takes the batches of vmap apart.
        sends_primals: whether a call may be differentiated, since it sends primals and returns nothing.
        by_clock: whether its messages depend on the clock, so that two runs of one program have different ones.
    """

    text: str
    is_check: bool = False
    folds: bool = False
    prints: bool = False
    is_text: bool = False
    has_metrics: bool = True
    has_arguments: bool = False
    by_element: bool = False
    sends_primals: bool = False
    by_clock: bool = False

    @classmethod
    def named(cls, text: str) -> TapKind:
        """The kind of that text; one with the defaults if this version does not know it."""
        return _BY_TEXT.get(text) or cls(text)


TAP = TapKind("tap")
PRINT = TapKind("print", prints=True)
FORMAT = TapKind("format", prints=True, is_text=True, has_arguments=True, by_element=True)
CALLBACK = TapKind("callback", has_arguments=True, by_element=True)
CHECK = TapKind("check", is_check=True, folds=True, is_text=True, has_metrics=False, has_arguments=True)
NONFINITE = TapKind("nonfinite", is_check=True, is_text=True, has_metrics=False)
BREAKPOINT = TapKind("breakpoint", has_metrics=False, sends_primals=True)
METRICS = TapKind("metrics")
PROGRESS = TapKind("progress", is_text=True, has_metrics=False, by_clock=True)
KNOB = TapKind("knob", is_text=True, has_metrics=False)
TIME = TapKind("time", is_text=True, has_metrics=False, by_clock=True)
UNDESCRIBED = TapKind("undescribed")
"""The kind of a tap of which a log knows no more than the name."""

KINDS = (
    TAP, PRINT, FORMAT, CALLBACK, CHECK, NONFINITE, BREAKPOINT, METRICS, PROGRESS, KNOB, TIME, UNDESCRIBED,
)  # fmt: skip
_BY_TEXT = {kind.text: kind for kind in KINDS}


def bar_names(bars: Set[str], others: Set[str]) -> dict[str, str]:
    """What the progress bars are called that have the name of another tap: `train (progress)`, or the next free name.

    Args:
        bars: the names of all bars.
        others: the names of all other taps.
    """
    names: dict[str, str] = {}
    taken = {*bars, *others}
    for bar in sorted(bars & others):
        free = (f"{bar} (progress {number})" for number in itertools.count(2))
        names[bar] = next(name for name in itertools.chain([f"{bar} (progress)"], free) if name not in taken)
        taken.add(names[bar])
    return names


LOGGED_ELEMENTS = "logged_elements"
"""A key in the `params` of a tap: of each array, logs and spools have this many elements at most."""

FIRST_PROCESS = "first"
ALL_PROCESSES = "all"
PROCESSES = (FIRST_PROCESS, ALL_PROCESSES)
"""The values of a tap's option `processes`, which the descriptor has among the params; see `hostcallback.id_tap`."""

DESCRIPTION_NESTING = 3 * limits.NESTING + 8
"""A container of the tapped pytree is two of its description; a value in it may be nested, too."""


@dataclass(frozen=True, slots=True)
class TapDescriptor:
    """The descriptor of a tap, which logs and the messages of exported programs contain.

    Attributes:
        name: the tap's name, by which consumers are bound.
        source_line: of the tap, where it was traced.
        consumer_id: of its consumer in the process that traced it.
        kind: purpose of the tap: the text of its `tap_kind`.
        params: further parameters of its sink.
        kwargs: its keyword arguments, as far as they are plain data.
        transforms: as tap functions receive them.
        tree: description of the tapped pytree.
        shards: None, or the shards of its arrays that a process sees ("all" or "some").
        sharding: "global" or "local".
    """

    name: str
    source_line: str
    consumer_id: int
    kind: str
    params: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    transforms: tuple[tuple[str, dict[str, Any]], ...]
    tree: tree.Description
    shards: str | None
    sharding: str

    @property
    def tap_kind(self) -> TapKind:
        """The tap's kind, with its properties."""
        return TapKind.named(self.kind)

    @property
    def device_index(self) -> int:
        """Index of the program's device that is named as the origin of a value assembled from shards."""
        index = self.params.get("device_index", 0)
        return index if isinstance(index, int) else 0

    @property
    def processes(self) -> str | None:
        """Which processes deliver its messages: one of `PROCESSES`, or None as by default."""
        processes = self.params.get("processes")
        return processes if processes in PROCESSES else None

    def pack(self) -> np.ndarray[Any, Any]:
        """Encodes the descriptor: uint8, shape (bytes,), the msgpack of a map.

        Raises:
            ValueError: the tap cannot be described, for example because its pytree is nested too deep.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        try:
            data = msgpack.packb(fields)
            TapDescriptor.unpack(data)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"the tap {self.name} at {self.source_line} cannot be exported, because a process that has not traced "
                f"it could not be told what it is: {error}"
            ) from error
        return np.frombuffer(data, np.uint8)

    @classmethod
    def unpack(cls, data: bytes) -> TapDescriptor:
        """Reverses `pack`.

        Raises:
            ValueError: `data` is not a descriptor.
        """
        try:
            if len(data) > limits.DESCRIPTION_BYTES:
                raise ValueError(f"at most {limits.DESCRIPTION_BYTES} are allowed")
            return cls(**_checked(pytree.unpack_plain(data, DESCRIPTION_NESTING)))
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{len(data)} bytes are not a descriptor of a tap: {error}") from error


_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "source_line": str,
    "consumer_id": int,
    "kind": str,
    "params": dict,
    "kwargs": dict,
    "transforms": list,
    "tree": list,
    "shards": (str, type(None)),
    "sharding": str,
}


def _checked(fields: Any) -> dict[str, Any]:
    # The data comes from outside this process, so every field is checked.
    if not isinstance(fields, dict) or fields.keys() != _TYPES.keys():
        raise ValueError(f"expected a map with {', '.join(_TYPES)}")
    for name, kind in _TYPES.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is a {type(fields[name]).__name__}")
    for name in ("name", "source_line", "kind"):
        if len(fields[name]) > limits.NAME_CHARS:
            raise ValueError(
                f"{name} has {len(fields[name])} characters, at most {limits.NAME_CHARS} are allowed"
            )
    for name in ("params", "kwargs", "transforms"):
        pytree.check_nesting(fields[name], limits.NESTING)
    if isinstance(fields["consumer_id"], bool) or not 0 <= fields["consumer_id"] < 2**64:
        raise ValueError(f"consumer_id is {fields['consumer_id']}, expected 64 bits")
    if fields["shards"] not in (None, "all", "some") or fields["sharding"] not in ("global", "local"):
        raise ValueError(f"shards is {fields['shards']!r} and sharding {fields['sharding']!r}")
    transforms = fields["transforms"]
    for item in transforms:
        if not (
            isinstance(item, list)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], dict)
        ):
            raise ValueError(f"transforms has {item!r}, expected a name and a map")
    for mapping in (fields["params"], fields["kwargs"], *(params for _, params in transforms)):
        if not all(isinstance(key, str) for key in mapping):
            raise ValueError(f"a map has the keys {list(mapping)}, expected texts")
    tree.unflatten_with(fields["tree"])
    return {**fields, "transforms": tuple((name, _with_tuples(params)) for name, params in transforms)}


def _with_tuples(params: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
