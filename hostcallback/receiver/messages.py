"""Messages, as sinks receive them, with the step and the names of their leaves; consumers, and the registry of them.

Consumer ids are the keys of the registry. A consumer stays registered while a compiled program can emit to it:
programs hold leases, and after the last lease ends it is retired, until a barrier has proved that no program of it
runs. Dispatchers look consumers up on receiver threads; lowering registers them on the user's threads.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.pytree import Description
from hostcallback.receiver.wire.tap_descriptor import PROGRESS, TapDescriptor, TapKind

Index = tuple[tuple[slice, ...], ...]
"""For each array, its place in the whole array: a slice per dimension."""


Sink = Callable[["Message"], Any]
"""Consumes messages; the sink of a call returns its results, a list of arrays. Called on the receiver thread of the
message's device, one message at a time per device and in order; several devices call it concurrently. Its exceptions
are deferred."""


class ArraysSink:
    """A sink that needs only the arrays of a message.

    A dispatcher then makes no `Message`, which would take a quarter of the time of a small message.

    Attributes:
        of_arrays: consumes the arrays of a message.
    """

    __slots__ = ("of_arrays",)

    def __init__(self, of_arrays: Callable[[Sequence[Any]], Any]) -> None:
        """Makes a sink of a function of the arrays."""
        self.of_arrays = of_arrays

    def __call__(self, message: Message) -> Any:
        """Consumes a message."""
        return self.of_arrays(message.arrays)


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


def launch_name(run_id: int) -> str:
    """The short name of a launch of a program, which all its devices share: its last six hexadecimal digits.

    Empty for 0, which stands for an unknown launch.
    """
    return f"{run_id & 0xFFFFFF:06x}" if run_id else ""


def launch_bits(launch: str) -> tuple[int, int]:
    """The bits of `run_id` that tell a launch, as a mask, and their value: of a short name, or of a decimal `run_id`.

    Raises:
        ValueError: it is neither. Six digits are a short name.
    """
    if re.fullmatch("[0-9a-fA-F]{6}", launch):
        return 0xFFFFFF, int(launch, 16)
    if re.fullmatch("-?[0-9]{1,19}", launch):
        return -1, int(launch)
    raise ValueError(
        f"got {launch!r}, expected a launch as reports show it, such as c2db94 (six hexadecimal digits), or its run_id"
    )


def device_text(device: Any) -> str:
    """Returns the name of a device in reports, such as `cpu:0`."""
    return f"{device.platform}:{device.id}" if hasattr(device, "platform") else str(device)


NAME = "step"


class StepSource(NamedTuple):
    """Source of the step in the messages of one tap.

    Attributes:
        array: index of the tapped array that is the step; -1 if the step is constant.
        value: the constant step.
    """

    array: int
    value: int = 0

    def is_at(self, index: int, shape: Sequence[int], dtype: Any) -> bool:
        """Whether the array of that index, shape and dtype is the step: it is an integer without dimensions."""
        return index == self.array and not shape and np.dtype(dtype).kind in "iu"

    def array_in(self, arrays: Sequence[Any]) -> Any:
        """The one among a message's arrays that is the step; None if none is."""
        array = arrays[self.array] if 0 <= self.array < len(arrays) else None
        found = np.asarray(array)
        return array if self.is_at(self.array, found.shape, found.dtype) and _fits(int(found)) else None

    def read(self, arrays: Sequence[Any]) -> int | None:
        """The step of a message with these arrays; None if it has none."""
        array = self.value if self.array < 0 else self.array_in(arrays)
        return None if array is None else int(array)


def step_place(described: TapDescriptor) -> StepSource | None:
    """Finds the source of the step in a tap's messages; None if they have no step.

    It is the first leaf called `step` in the tapped pytree (an item of a dict or a field of a namedtuple, at any depth)
    that is an array or an integer, or else the keyword argument of that name. An object with one leaf, such as
    `flax.nnx.Variable`, gives the leaf its name. The `step=` of a check or a print comes before those in its other
    arguments. Only a message shows whether the array is an integer without dimensions.
    """
    arrays, found = 0, []
    for depth, name, leaf in _leaves(described.tree, ""):
        if name == NAME and leaf[0] == "array":
            found.append((depth, StepSource(arrays)))
        elif name == NAME and leaf[0] == "value" and type(leaf[1]) is int and _fits(leaf[1]):
            found.append((depth, StepSource(-1, leaf[1])))
        arrays += leaf[0] == "array"
    if found:
        return min(found, key=lambda each: each[0] if described.tap_kind.has_arguments else 0)[1]
    value = described.kwargs.get(NAME)
    return StepSource(-1, value) if type(value) is int and _fits(value) else None


def own_step(message: Message) -> int | None:
    """The step that a message itself has, see `step_place`; None if it has none. Never raises."""
    try:
        place = _own_place(message.consumer)
    except (ValueError, LookupError):  # the tap cannot be described
        return None
    return None if place is None else place.read(message.arrays)


_own_places: weakref.WeakKeyDictionary[Consumer, StepSource | None] = weakref.WeakKeyDictionary()
"""Found once for each consumer: its description takes longer than the rest of a failure's account."""


def _own_place(consumer: Consumer) -> StepSource | None:
    if consumer not in _own_places:
        _own_places[consumer] = None if consumer.describe is None else step_place(consumer.describe())
    return _own_places[consumer]


def _fits(value: int) -> bool:
    return -(2**63) < value < 2**63


def _leaves(description: Description, name: str, depth: int = 0) -> Iterator[tuple[int, str, Description]]:
    # The leaves of a pytree in order, each with its depth and its key.
    kind, *rest = description
    only = _only_leaf(description) if name == NAME else None
    if only is not None:
        yield depth, name, only
    elif kind in ("tuple", "list", "node"):
        for child in rest[-1]:
            yield from _leaves(child, "", depth + 1)
    elif kind == "namedtuple":
        for field, child in zip(rest[1], rest[2], strict=True):
            yield from _leaves(child, field, depth + 1)
    elif kind == "dict":
        for key, child in zip(rest[0], rest[1], strict=True):
            yield from _leaves(child, _text(key), depth + 1)
    else:
        yield depth, name, description


def _only_leaf(description: Description) -> Description | None:
    # The leaf of a pytree that has one; None if it has more or none.
    kind, *rest = description
    while kind in ("tuple", "list", "node", "namedtuple", "dict"):
        if len(rest[-1]) != 1:
            return None
        description = rest[-1][0]
        kind, *rest = description
    return None if kind == "none" else description


def _text(key: Any) -> str:
    return key[1] if key[0] == "value" and type(key[1]) is str else ""


class _Place(NamedTuple):
    # Placeholder for an array of a message.
    number: int


BAR = "phase", "done", "total", "postfix"
"""Names of the parts of a bar's message. What is done is a number of steps, and no step."""


def by_name(kind: TapKind, value: Any) -> Any:
    """The value of a tap of that kind; args and kwargs become one dict, with arguments by name or number.

    That of a bar becomes a dict, too.
    """
    if kind is PROGRESS:
        return dict(zip(BAR, value, strict=True))
    if not kind.has_arguments:
        return value
    *first, args, kwargs = value  # print("loss {loss}", loss=x); a check has its predicate before them
    numbered = {str(number): arg for number, arg in enumerate(args)}
    return {**({"predicate": first[0]} if first else {}), **numbered, **kwargs}


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a pytree in order, each with its name: `name`, and the keys to the leaf after slashes.

    With the name "" a single leaf is called "", and others by their keys alone.
    """
    items: Any
    if isinstance(value, tree.Opaque | _Place):
        yield name, value
        return
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tree.Node):
        items = enumerate(value.children)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        text = key.text if isinstance(key, tree.Opaque) else key
        yield from named_leaves(f"{name}/{text}" if name else str(text), item)


def array_names(kind: TapKind, unflatten: Callable[[Sequence[Any]], Any], count: int) -> list[str]:
    """Names of the `count` arrays of a tap's messages. A stand-in, sent if no array is tapped, has no name.

    Raises:
        ValueError: the tap's messages do not have `count` arrays.
    """
    value = by_name(kind, unflatten([_Place(index) for index in range(count)]))
    places = {leaf.number: name for name, leaf in named_leaves("", value) if isinstance(leaf, _Place)}
    return [places[index] for index in range(len(places))]


Find = Callable[[int], Consumer | None]
"""Returns the consumer with an id, if it is registered."""

RETIRED_KEPT = 1024
RETIRED_SEC = 60.0
"""Minimum seconds for which a consumer stays registered after its programs are gone, and the number of consumers that
stay longer. A program that was dropped may still run, and its messages may be queued: they must find their consumer. A
barrier proves that there are none left, and forgets the consumers at once."""


class Lease:
    """Keeps one consumer registered. Each program that emits to the consumer holds a lease."""

    __slots__ = ("__weakref__", "consumer")

    def __init__(self, consumer: Consumer) -> None:
        """Called by `Registry.lease`."""
        self.consumer = consumer


class Registry:
    """Maps consumer ids to consumers. Any thread; `find` takes no lock."""

    def __init__(self) -> None:
        """The registry is empty."""
        self._lock = threading.RLock()  # protects _leases and _retired
        self._consumers: dict[int, Consumer] = {}
        self._leases: dict[int, int] = {}
        self._retired: deque[tuple[int, float]] = deque()
        # Finalizers run inside the garbage collector, on any thread, perhaps while this thread holds the lock: they
        # only append here, and the next thread that takes the lock does their work.
        self._ended: deque[int] = deque()
        self._watchers: list[Callable[[Consumer], None]] = []

    def find(self, consumer_id: int) -> Consumer | None:
        """The consumer of an id; None if it is not registered."""
        return self._consumers.get(consumer_id)

    def lease(self, consumer: Consumer) -> Lease:
        """Registers the consumer until the returned lease, and every other lease of its id, is gone.

        If the id is registered, the existing consumer and its sink state are kept, because equal ids mean equal taps.
        """
        with self._lock:
            self._settle()
            lease = Lease(self._consumers.setdefault(consumer.consumer_id, consumer))
            self._leases[consumer.consumer_id] = self._leases.get(consumer.consumer_id, 0) + 1
            # Called without the lock: watchers take locks of their own, whose holders may look up consumers.
            watchers = list(self._watchers) if lease.consumer is consumer else []
        for watcher in watchers:
            watcher(consumer)
        weakref.finalize(lease, self._ended.append, consumer.consumer_id).atexit = False
        return lease

    def watch(self, watcher: Callable[[Consumer], None]) -> None:
        """Calls `watcher`, which must not raise, with every registered consumer, and with each later one."""
        with self._lock:
            self._watchers.append(watcher)
            known = list(self._consumers.values())
        for consumer in known:
            watcher(consumer)

    def consumers(self) -> list[Consumer]:
        """The registered consumers."""
        with self._lock:
            return list(self._consumers.values())

    def retired(self) -> list[tuple[int, float]]:
        """Consumers whose programs were freed, with the time: a barrier may forget them when it has finished."""
        with self._lock:
            self._settle()
            return list(self._retired)

    def forget(self, retired: Iterable[tuple[int, float]]) -> None:
        """Forgets consumers of an earlier `retired`, for which no message can come any more."""
        gone = set(retired)
        with self._lock:
            self._retired = deque(entry for entry in self._retired if entry not in gone)
            again = {consumer_id for consumer_id, _ in self._retired}  # leased and retired again meanwhile
            for consumer_id in {consumer_id for consumer_id, _ in gone} - again:
                self._forget(consumer_id)

    def __len__(self) -> int:
        """Number of registered consumers, retired ones included."""
        return len(self._consumers)

    def _settle(self) -> None:
        while self._ended:
            consumer_id = self._ended.popleft()
            left = self._leases[consumer_id] - 1
            if left:
                self._leases[consumer_id] = left
            else:
                del self._leases[consumer_id]
                self._retired.append((consumer_id, monotonic()))
        while len(self._retired) > RETIRED_KEPT and monotonic() - self._retired[0][1] > RETIRED_SEC:
            self._forget(self._retired.popleft()[0])

    def _forget(self, consumer_id: int) -> None:
        if consumer_id not in self._leases:  # otherwise it was leased again meanwhile
            self._consumers.pop(consumer_id, None)
