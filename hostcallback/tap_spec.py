"""What one tap in a program is: its function, arguments and source line, and the ids derived from them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hostcallback.fingerprint import Fingerprint, describe_structure, freeze
from hostcallback.source_line import SourceLine
from receiver.consumer import Consumer, Sink

Transform = tuple[str, Any]
"""("batch", dims) | ("jvp", None) | ("transpose", None): hashable, as equations carry it."""

Absent = tuple[tuple[int, tuple[int, ...]], ...]
"""(leaf index, shape) of the float0 leaves, which have no bytes and stay on the host."""

SinkFactory = Callable[["TapSpec", tuple["Transform", ...], Absent], Sink]


class TapSpec:
    """The static part of a tap: what its equations in a jaxpr refer to.

    Equal taps are one object (`intern`), so programs that hold equal taps share consumer ids, and equations
    may compare specs by identity. A spec lives as long as a jaxpr, a program or an eager call refers to it.

    Attributes:
        name: the tap function's name.
        source_line: where the user called the tap.
        kwargs: the tap's keyword arguments, for reports.
        ordered: whether its messages keep program order on each device.
        tangents: whether tangents and cotangents are tapped too.
        make_sink: makes the sink of the spec under given transformations.
    """

    __slots__ = (
        "__weakref__",
        "_key",
        "fingerprint",
        "kwargs",
        "make_sink",
        "name",
        "ordered",
        "source_line",
        "structure",
        "tangents",
    )

    def __init__(
        self,
        *,
        name: str,
        source_line: SourceLine,
        kwargs: Mapping[str, Any],
        ordered: bool,
        tangents: bool,
        structure: Any,
        identity: tuple[Any, ...],
        make_sink: SinkFactory,
    ) -> None:
        """`identity` holds everything the sink's behaviour depends on beside `kwargs` and `structure`."""
        self.name = name
        self.source_line = source_line
        self.kwargs = dict(kwargs)
        self.ordered = ordered
        self.tangents = tangents
        self.structure = structure
        self.make_sink = make_sink
        self.fingerprint = Fingerprint(identity, freeze(kwargs))
        place = (source_line.module, source_line.function, source_line.line)
        text = repr((name, place, ordered, tangents, describe_structure(structure), self.fingerprint.text))
        self._key = hashlib.blake2b(text.encode(), digest_size=16).digest()

    def __repr__(self) -> str:
        """As jaxprs print it."""
        return f"{self.name}@{self.source_line.module}:{self.source_line.line}"

    def intern(self) -> TapSpec:
        """The live spec equal to this one, or this one from now on."""
        # Ids identify the captured objects as long as a spec that holds them lives, and its entry lives no longer.
        place = (self._key, tuple(map(id, self.fingerprint.opaque)), self.structure)
        with _interned_lock:
            live = _interned.get(place)
            if live is not None:
                return live
            _interned[place] = self
            if self.fingerprint.opaque:
                # Taps that differ only in the objects they captured (two calls of one closure factory) are
                # numbered in order of first tracing, which every process that runs the program shares. A number
                # is never used again: messages of a program that was dropped may still be on their way.
                ordinal = _ordinals.get(self._key, 0)
                _ordinals[self._key] = ordinal + 1
                self._key += ordinal.to_bytes(8, "little")
        return self

    def consumer_id(self, transforms: tuple[Transform, ...], absent: Absent) -> int:
        """64 bits, equal in every process that traces the same tap; never 0."""
        digest = hashlib.blake2b(repr((self._key, transforms, absent)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little") or 1

    def consumer(self, transforms: tuple[Transform, ...], absent: Absent) -> Consumer:
        """The consumer that messages of this tap under these transformations are for."""
        return Consumer(
            consumer_id=self.consumer_id(transforms, absent),
            name=self.name,
            source_line=str(self.source_line),
            sink=self.make_sink(self, transforms, absent),
            transforms=public_transforms(transforms),
            kwargs=self.kwargs,
        )


_interned_lock = threading.Lock()  # protects both tables
_interned: weakref.WeakValueDictionary[Any, TapSpec] = weakref.WeakValueDictionary()
_ordinals: dict[bytes, int] = {}


def public_transforms(transforms: tuple[Transform, ...]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """`transforms` as tap functions see it: `(("batch", {"batch_dims": (0, None)}), ("jvp", {}))`."""
    return tuple((name, {"batch_dims": data} if name == "batch" else {}) for name, data in transforms)
