"""Makes the sinks of taps that this process never traced, from their descriptions and the functions bound to them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.messages.call_site import MAX_PLACES, CallSite, described_place, location_of
from hostcallback.receiver.messages.message import Consumer, Message, Sink
from hostcallback.receiver.sinks.check import CheckSink
from hostcallback.receiver.sinks.described_template import bounded, print_options
from hostcallback.receiver.sinks.format import FormatSink, PrintLines, Template, log_records
from hostcallback.receiver.sinks.nonfinite import NonFiniteSink, Watched
from hostcallback.receiver.sinks.print import PrintSink
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink, shard_sink
from hostcallback.receiver.sinks.tap import callback_sink, tap_sink
from hostcallback.receiver.sinks.unbatch import Batchings, for_each_element
from hostcallback.receiver.wire import pytree as tree, tap_kind
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostcallback.receiver.wire.tap_kind import TapKind


@dataclass(frozen=True, slots=True)
class Binding:
    """A function that takes the messages of the taps of one name.

    Attributes:
        func: called in place of the tap's function, with the same arguments.
        kwargs: additional keyword arguments; they override the tap's.
    """

    func: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _bound_tap(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    if binding is None:
        return None
    kwargs = {**described.kwargs, **binding.kwargs}
    batched = bool(described.params.get("batched"))
    return tap_sink(binding.func, kwargs, tree.unflatten_with(described.tree), batched=batched)


def _print(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    if binding is not None:
        return _bound_tap(described, binding)
    unflatten = tree.unflatten_with(described.tree)
    params = described.params
    threshold = params["threshold"]
    if threshold is not None and (type(threshold) is not int or threshold < 0):
        raise ValueError(f"the threshold is {str(threshold)[:80]!r}, expected a number of elements")

    def shown(arrays: Sequence[Any]) -> Any:
        return bounded(unflatten(arrays), threshold)

    return PrintSink(described.kwargs, shown, None, threshold, with_device=bool(params.get("with_device")))


def batchings_of(described: TapDescriptor) -> Batchings:
    """Returns the vmaps around a tap, in the format of `unbatch`."""
    return [params["batch_dims"] for name, params in described.transforms if name == "batch"]


def _format(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    unflatten, batchings = tree.unflatten_with(described.tree), batchings_of(described)
    if binding is not None:
        func = functools.partial(binding.func, **binding.kwargs)
        return callback_sink(func, unflatten, batchings, most=limits.BATCH_ELEMENTS)
    params = described.params
    template = template_of(described)
    deliver: Callable[[list[str]], None] = PrintLines(None)
    if "logger" in params:
        name, level = params["logger"], params["level"]
        if type(name) is not str or type(level) is not int or len(name) > limits.LOGGER_CHARS:
            raise ValueError(f"the logger is {str(name)[:80]!r} with the level {str(level)[:20]}")
        deliver = log_records(logging.getLogger(name), level, *location_of(described.source_line))
    return FormatSink(template, unflatten, batchings, deliver)


def template_of(described: TapDescriptor) -> Template:
    """Returns the template of a tap of the kind "format" or "check"."""
    params = described.params
    fmt = params["fmt"]
    if type(fmt) is not str:
        raise ValueError(f"the format string is a {type(fmt).__name__}")
    return Template(
        fmt, bool(params["has_placeholders"]), print_options(params["printoptions"]), is_foreign=True
    )


def _callback(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    return None if binding is None else _format(described, binding)


def _check(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    unflatten, batchings = tree.unflatten_with(described.tree), batchings_of(described)
    if binding is None:
        return CheckSink(template_of(described), unflatten, batchings, _places(described))

    def call(arrays: Sequence[Any]) -> None:
        predicate, args, kwargs = unflatten(arrays)
        if not np.all(predicate):
            binding.func(*args, **{**kwargs, **binding.kwargs})

    return lambda message: for_each_element(message, batchings, call, most=limits.BATCH_ELEMENTS)


def _places(described: TapDescriptor) -> list[CallSite]:
    places = described.params.get("places", [])
    if not isinstance(places, list) or len(places) > MAX_PLACES:
        raise ValueError(f"the places of a check are {str(places)[:80]}")
    return [described_place(stack, span) for stack, span in places]


def _nonfinite(described: TapDescriptor, binding: Binding | None) -> Sink | None:
    if binding is not None or "operations" not in described.params:
        return _bound_tap(described, binding)
    operations = [Watched.from_plain(operation) for operation in described.params["operations"]]
    return NonFiniteSink(tree.unflatten_with(described.tree), operations)


MakeSink = Callable[[TapDescriptor, Binding | None], Sink | None]
"""Makes the sink of one kind of tap in a process that never traced it; None if the kind needs a binding."""

SINK_FACTORIES: dict[TapKind, MakeSink] = {
    tap_kind.TAP: _bound_tap,
    tap_kind.PRINT: _print,
    tap_kind.FORMAT: _format,
    tap_kind.CALLBACK: _callback,
    tap_kind.CHECK: _check,
    tap_kind.NONFINITE: _nonfinite,
}


def own_sink(described: TapDescriptor) -> Sink | None:
    """Returns the sink of a tap without a binding; None if its kind needs a binding.

    Raises:
        LookupError: its params do not fit its kind.
        TypeError: as above.
        ValueError: as above.
    """
    return SINK_FACTORIES.get(described.tap_kind, _bound_tap)(described, None)


def texts_of(described: TapDescriptor, message: Message) -> list[str] | None:
    """Returns the texts that a message prints, logs or reports as failed checks; None for other kinds of taps.

    Raises:
        Exception: of any kind, if the message does not fit the description of the tap.
    """
    texts: Callable[[Message], list[str]] | None = getattr(own_sink(described), "texts", None)
    return None if texts is None else texts(message)


class BoundTap:
    """A tap that this process knows by its description, and the current sink of its messages.

    Attributes:
        described: the description.
        binding: the function bound to it; None if there is none.
        consumer: takes the messages as the device sends them, including those of shards.
    """

    __slots__ = ("_also", "_by_itself", "_make", "_sink", "binding", "consumer", "described")

    def __init__(
        self,
        described: TapDescriptor,
        binding: Binding | None,
        *,
        unbound: Callable[[TapDescriptor], Sink],
        is_another_receiver_busy: Callable[[], bool] = lambda: False,
        waits: bool = True,
        also: Sequence[Sink] = (),
        joint: Callable[[TapDescriptor, Sink], Sink] | None = None,
        escapes: bool = False,
    ) -> None:
        """Makes the tap.

        Args:
            described: the description.
            binding: the function that takes its messages. None for the printer, log or check of its kind, or for
                `unbound` if its kind has none.
            unbound: makes the sink of a tap without a binding whose kind has no sink without one.
            is_another_receiver_busy: see `hostcallback.receiver.sinks.sharding.sinks.AssemblingSink`.
            waits: see `AssemblingSink`.
            also: sinks that get every message first.
            joint: makes the sink of shards of values that several processes share, given the sink of whole values;
                without it each shard is handed on separately.
            escapes: whether the texts that its kind's sink prints or logs are escaped, as texts from outside this
                process.

        Raises:
            ValueError: its params do not fit its kind.
        """
        self.described = described
        self._also = tuple(also)
        self._make = SINK_FACTORIES.get(described.tap_kind, _bound_tap)
        try:
            own = self._make(described, None)
            if escapes and isinstance(own, FormatSink | PrintSink):
                own = own.escaped()
            self._by_itself = own or unbound(described)
            self.bind(binding)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"the tap {described.name!r} at {described.source_line} is described as of the kind "
                f"{described.kind!r} with params that do not go with it: {error!r}"
            ) from error
        # The binding may change while shards of a value arrive, so `_deliver` looks it up once the value is complete.
        sink: Sink = self._deliver
        if joint is not None and described.shards == "some" and described.sharding == "global":
            sink = joint(described, sink)
        elif described.shards is not None:
            assemble = described.shards == "all"
            sink = shard_sink(
                sink, described.sharding, assemble=assemble, device_index=described.device_index,
                is_another_receiver_busy=is_another_receiver_busy, waits=waits,
            )  # fmt: skip
        self.consumer = Consumer(
            described.consumer_id,
            described.name,
            described.source_line,
            sink,
            described.transforms,
            described.kwargs,
            is_check=described.tap_kind.is_check,
            describe=lambda: described,
            unflatten=lambda arrays: tree.unflatten_with(described.tree)(arrays),
        )

    @property
    def has_pending_values(self) -> bool:
        """Whether the tap has incomplete values."""
        sink = self.consumer.sink
        return isinstance(sink, AssemblingSink) and sink.pending_values > 0

    def bind(self, binding: Binding | None) -> None:
        """Binds another function to the tap, or none."""
        self.binding = binding
        bound = None if binding is None else self._make(self.described, binding)
        self._sink = bound or self._by_itself

    def _deliver(self, message: Message) -> None:
        for sink in self._also:
            sink(message)
        self._sink(message)
