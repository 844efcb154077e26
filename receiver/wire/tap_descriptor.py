"""The descriptor of a tap, for processes that have not traced it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.plain import check_nesting, unpack_plain
from hostcallback.receiver.wire.tap_kind import TapKind

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
        """What the tap is for, and what that implies."""
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
            return cls(**_checked(unpack_plain(data, DESCRIPTION_NESTING)))
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
        check_nesting(fields[name], limits.NESTING)
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
