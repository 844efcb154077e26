"""The consumers of exported programs, whose messages bring the description of their tap along.

A program that `jax.export` wrote runs in processes that never traced it. Its taps send to one of two consumers that
every process has. The first array of such a message (after the shard record, if there is one) is the description, see
`receiver.described`. By the name in it the tap finds the function that was bound to it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from receiver import tree
from receiver.consumer import Consumer, Sink
from receiver.deferred import FailureOf
from receiver.described import Described
from receiver.errors import UnboundConsumerError
from receiver.message import Message
from receiver.registry import Registry
from receiver.shard_record import PLACES_FROM
from receiver.shards import AssemblingSink, shard_sink
from receiver.sinks.callback import callback_sink
from receiver.sinks.check import CheckSink
from receiver.sinks.format import FormatSink, Template, log_records, print_lines
from receiver.sinks.print import PrintSink
from receiver.sinks.tap import tap_sink
from receiver.sinks.unbatch import Batchings, for_each_element

WHOLE_ID = int.from_bytes(b"exported", "little")
SHARDS_ID = int.from_bytes(b"shardsof", "little")
"""Consumer ids of the taps of exported programs: of whole arrays, and of shards."""

MAX_TAPS = 4096
"""How many descriptions are remembered. Those beyond that are read again with each message."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A function that takes the messages of the exported taps of one name.

    Attributes:
        func: called as the tap's function would be.
        kwargs: passed to it too; they win over the tap's own.
    """

    func: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _bound_tap(described: Described, binding: Binding | None) -> Sink | None:
    if binding is None:
        return None
    kwargs = {**described.kwargs, **binding.kwargs}
    batched = bool(described.params.get("batched"))
    return tap_sink(binding.func, kwargs, tree.unflatten_with(described.tree), batched=batched)


def _print(described: Described, binding: Binding | None) -> Sink | None:
    if binding is not None:
        return _bound_tap(described, binding)
    unflatten = tree.unflatten_with(described.tree)
    params = described.params
    return PrintSink(
        described.kwargs, unflatten, None, params["threshold"], with_device=params.get("with_device", False)
    )


def _batchings(described: Described) -> Batchings:
    return [params["batch_dims"] for name, params in described.transforms if name == "batch"]


def _format(described: Described, binding: Binding | None) -> Sink | None:
    unflatten, batchings = tree.unflatten_with(described.tree), _batchings(described)
    if binding is not None:
        return callback_sink(functools.partial(binding.func, **binding.kwargs), unflatten, batchings)
    params = described.params
    template = _template(described)
    deliver = print_lines(None)
    if "logger" in params:
        file, _, rest = described.source_line.rpartition(":")
        line, _, function = rest.partition(" ")
        logger = logging.getLogger(params["logger"])
        deliver = log_records(logger, params["level"], file, int(line), function.strip("()"))
    return FormatSink(template, unflatten, batchings, deliver)


def _template(described: Described) -> Template:
    params = described.params
    return Template(params["fmt"], params["has_placeholders"], params["printoptions"])


def _callback(described: Described, binding: Binding | None) -> Sink | None:
    return None if binding is None else _format(described, binding)


def _check(described: Described, binding: Binding | None) -> Sink | None:
    unflatten, batchings = tree.unflatten_with(described.tree), _batchings(described)
    if binding is None:
        return CheckSink(_template(described), unflatten, batchings, ())

    def call(arrays: Sequence[Any]) -> None:
        predicate, args, kwargs = unflatten(arrays)
        if not np.all(predicate):
            binding.func(*args, **{**kwargs, **binding.kwargs})

    return lambda message: for_each_element(message, batchings, call)


MakeSink = Callable[[Described, Binding | None], Sink | None]
"""Makes the sink of one kind of tap in a process that never traced it; None where that takes a binding."""

SINKS: dict[str, MakeSink] = {
    "tap": _bound_tap,
    "print": _print,
    "format": _format,
    "callback": _callback,
    "check": _check,
}


def _unbound(described: Described) -> Sink:
    def report(message: Message) -> None:
        raise UnboundConsumerError(
            f"messages of the exported tap {described.name!r} (exported from {described.source_line}), to which "
            f"nothing is bound in this process: hostcallback.bind({described.name!r}, function) before the program runs"
        )

    return report


class _Tap:
    # What its description tells of a tap, and what takes its messages now.

    __slots__ = ("_by_itself", "_make", "_sink", "binding", "consumer", "described")

    def __init__(
        self, described: Described, binding: Binding | None, others_deliver: Callable[[], bool]
    ) -> None:
        self.described = described
        self._make = SINKS.get(described.kind, _bound_tap)
        self._by_itself = self._make(described, None) or _unbound(described)
        self.bind(binding)
        # What is bound may change while shards of a value are coming in: it is looked up when they are together.
        sink: Sink = self._deliver
        if described.shards is not None:
            assemble = described.shards == "all"
            sink = shard_sink(sink, described.sharding, assemble=assemble, others_deliver=others_deliver)
        self.consumer = Consumer(
            described.consumer_id,
            described.name,
            described.source_line,
            sink,
            described.transforms,
            described.kwargs,
        )

    @property
    def has_pending_values(self) -> bool:
        sink = self.consumer.sink
        return isinstance(sink, AssemblingSink) and sink.pending_values > 0

    def bind(self, binding: Binding | None) -> None:
        self.binding = binding
        bound = None if binding is None else self._make(self.described, binding)
        self._sink = bound or self._by_itself

    def _deliver(self, message: Message) -> None:
        self._sink(message)


class ExportedTaps:
    """The consumers of exported programs, and what is bound to them. Any thread.

    A message goes to what is bound to its tap's name; if nothing is, to the consumer of that very tap, where this
    process has traced it too; if it has not, taps that print or log do so, and the others are reported.
    """

    def __init__(self, registry: Registry, others_deliver: Callable[[], bool] = lambda: False) -> None:
        """Registers the two consumers.

        Args:
            registry: knows the consumers of taps that this process traced itself.
            others_deliver: see `receiver.shards.AssemblingSink`.
        """
        self._registry = registry
        self._others_deliver = others_deliver
        self._lock = threading.Lock()  # protects the two tables
        self._bindings: dict[str, Binding] = {}
        self._taps: OrderedDict[bytes, _Tap] = OrderedDict()  # by description, the last used last
        self._leases = [
            registry.lease(Consumer(WHOLE_ID, "exported tap", "an exported program", self._deliver)),
            registry.lease(Consumer(SHARDS_ID, "exported tap", "an exported program", self._deliver_shard)),
        ]

    def bind(self, name: str, binding: Binding | None) -> None:
        """Delivers the exported taps of that name to `binding` from now on; None ends that.

        Values whose shards are coming in go to what is bound when the last shard is there.
        """
        with self._lock:
            if binding is None:
                self._bindings.pop(name, None)
            else:
                self._bindings[name] = binding
            for tap in self._taps.values():
                if tap.described.name == name:
                    tap.bind(binding)

    def _deliver(self, message: Message) -> None:
        if not message.arrays:
            raise ValueError("a message of an exported program came without the description of its tap")
        description, *arrays = message.arrays
        self._hand_on(message, description, arrays)

    def _deliver_shard(self, message: Message) -> None:
        if len(message.arrays) < 2:
            raise ValueError(
                "a message of shards of an exported program came without its shard record or the description of its tap"
            )
        record, description, *arrays = message.arrays
        # The description is an array like the others: it has a place in the record.
        record = np.concatenate([record[:PLACES_FROM], record[PLACES_FROM + 2 :]])
        self._hand_on(message, description, [record, *arrays])

    def _hand_on(self, message: Message, description: np.ndarray[Any, Any], arrays: list[Any]) -> None:
        tap = self._tap_of(description.tobytes())
        consumer = tap.consumer
        if tap.binding is None:
            consumer = self._registry.find(tap.described.consumer_id) or consumer
        try:
            consumer.sink(message._replace(consumer=consumer, arrays=arrays))
        except BaseException as error:
            raise FailureOf(consumer, error) from error

    def _tap_of(self, description: bytes) -> _Tap:
        with self._lock:
            tap = self._taps.get(description)
            if tap is None:
                described = Described.unpack(description)
                try:
                    tap = _Tap(described, self._bindings.get(described.name), self._others_deliver)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise ValueError(
                        f"the exported tap {described.name!r} (exported from {described.source_line}) is described as "
                        f"of the kind {described.kind!r} with params that do not go with it: {error!r}"
                    ) from error
                if len(self._taps) >= MAX_TAPS:
                    self._forget_one()
                self._taps[description] = tap
            else:
                self._taps.move_to_end(description)
            return tap

    def _forget_one(self) -> None:
        # The one that was used least lately; one with values that are coming in only if many have them.
        oldest = list(itertools.islice(self._taps.items(), 64))
        idle = [description for description, tap in oldest if not tap.has_pending_values]
        del self._taps[idle[0] if idle else oldest[0][0]]
