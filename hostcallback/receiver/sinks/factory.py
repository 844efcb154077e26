"""Makes the sinks of taps by kind: of taps that this process traced, of exported taps, and of taps in logs.

A new kind of tap takes three edited files, apart from new modules for its sink and its public function:

1. `receiver/wire/tap_descriptor.py`: the kind, what it implies, and its place in `KINDS`.
2. This module: a function that makes its sink, in `SINK_FACTORIES`. A sink of a kind that `prints` or `is_text` has a
   method `texts(message)`: what readers of logs and streams show. One that prints has a method `escaped()`, too: the
   same sink for text from outside this process.
3. `hostcallback/__init__.pyi`: exports the public function, which calls `bind_tap` with
   `TapOptions(kind=..., params=...)` and with a `Binding` of what cannot be described.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.failures.call_site import MAX_PLACES, CallSite, described_place, location_of
from hostcallback.receiver.messages import Consumer, Message, Sink
from hostcallback.receiver.sinks import batches
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink, ProcessShardSink, shard_sink
from hostcallback.receiver.sinks.tap import Unflatten, callback_sink, tap_sink, with_python_scalars
from hostcallback.receiver.wire import pytree as tree, tap_descriptor
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor, TapKind

# A function below imports the sink of its kind: a process imports those that it has.
if TYPE_CHECKING:
    from hostcallback.receiver.sinks import printing


@dataclass(frozen=True, slots=True)
class Binding:
    """The parts of a tap that a descriptor cannot hold: a function, or objects for its sink.

    Attributes:
        func: called in place of the tap's function, with the same arguments; None for the sink of the kind.
        kwargs: additional keyword arguments for `func`; they override the tap's.
        objects: objects that the sink of the kind uses in place of `params`, by name, such as an output stream.
        calls: makes the sink that calls `func`; takes the arguments of `tap_sink`.
        around: wraps the sink.
    """

    func: Callable[..., Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    calls: Callable[..., Sink] = tap_sink
    around: Callable[[Sink], Sink] | None = None


NOTHING_BOUND = Binding()


@dataclass(frozen=True, slots=True)
class TapParts:
    """A tap as the factories of sinks see it.

    Attributes:
        source_line: where it was traced, as text.
        params: plain data for a sink of its kind.
        kwargs: its keyword arguments.
        transforms: as tap functions get them.
        unflatten: makes the tapped value from the arrays of a message.
        places: where it was traced, for checks; may grow. None if `params` tell it.
        is_foreign: whether another process described it. Such a description is not trusted.
    """

    source_line: str
    params: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    transforms: tuple[tuple[str, dict[str, Any]], ...]
    unflatten: Unflatten
    places: Sequence[CallSite] | None = None
    is_foreign: bool = False

    @classmethod
    def of(cls, described: TapDescriptor) -> TapParts:
        """Returns the parts of a described tap."""
        return cls(
            described.source_line,
            described.params,
            described.kwargs,
            described.transforms,
            tree.unflatten_with(described.tree),
            is_foreign=True,
        )

    @property
    def batchings(self) -> batches.Batchings:
        """The vmaps around the tap, see `batches.Batchings`."""
        return batches.batchings_of(self.transforms)

    @property
    def most_elements(self) -> int | None:
        """Maximum number of elements of a batch; None for no limit."""
        return limits.BATCH_ELEMENTS if self.is_foreign else None


def _tap(parts: TapParts, binding: Binding) -> Sink | None:
    if binding.func is None:
        return None
    kwargs = {**parts.kwargs, **binding.kwargs}
    return binding.calls(
        binding.func, kwargs, _unflatten_of(parts), batched=bool(parts.params.get("batched"))
    )


def _unflatten_of(parts: TapParts) -> Unflatten:
    return with_python_scalars(parts.unflatten) if parts.params.get("python_scalars") else parts.unflatten


def _print(parts: TapParts, binding: Binding) -> Sink | None:
    if binding.func is not None:
        return _tap(parts, binding)
    from hostcallback.receiver.sinks import printing

    stream, threshold, unflatten = (
        binding.objects.get("output_stream"),
        parts.params["threshold"],
        parts.unflatten,
    )
    with_device = bool(parts.params.get("with_device"))
    if parts.is_foreign:
        if threshold is not None and (type(threshold) is not int or threshold < 0):
            raise ValueError(f"the threshold is {str(threshold)[:80]!r}, expected a number of elements")
        unflatten = _bounded(unflatten, threshold)
    return printing.PrintSink(parts.kwargs, unflatten, stream, threshold, with_device=with_device)


def _bounded(unflatten: Unflatten, threshold: int | None) -> Unflatten:
    from hostcallback.receiver.sinks import described_template

    return lambda arrays: described_template.bounded(unflatten(arrays), threshold)


def _format(parts: TapParts, binding: Binding) -> Sink | None:
    if binding.func is not None:
        return _callback(parts, binding)
    from hostcallback.receiver.sinks import printing

    return printing.FormatSink(
        _template(parts, binding), parts.unflatten, parts.batchings, _deliver(parts, binding)
    )


def _template(parts: TapParts, binding: Binding) -> printing.Template:
    from hostcallback.receiver.sinks import printing

    return binding.objects.get("template") or printing.Template.from_params(parts.params)


def _deliver(parts: TapParts, binding: Binding) -> printing.Deliver:
    from hostcallback.receiver.sinks import printing

    params, objects = parts.params, binding.objects
    if "deliver" in objects:
        deliver: printing.Deliver = objects["deliver"]
        return deliver
    if "logger" not in params:
        return printing.PrintLines(objects.get("output_stream"))
    logger, level = objects.get("logger"), params["level"]
    if logger is None:
        name = params["logger"]
        if type(name) is not str or type(level) is not int or len(name) > limits.LOGGER_CHARS:
            raise ValueError(f"the logger is {str(name)[:80]!r} with the level {str(level)[:20]}")
        logger = logging.getLogger(name)
    return printing.log_records(logger, level, *location_of(parts.source_line))


def _callback(parts: TapParts, binding: Binding) -> Sink | None:
    func, unflatten, present = binding.func, _unflatten_of(parts), binding.objects.get("present")
    if func is None:
        return None
    if binding.kwargs:
        func = functools.partial(func, **binding.kwargs)
    arg_of = unflatten if present is None else lambda arrays: unflatten([*map(present, arrays)])
    return callback_sink(func, arg_of, parts.batchings, most=parts.most_elements)


def _check(parts: TapParts, binding: Binding) -> Sink | None:
    func, unflatten, batchings = binding.func, parts.unflatten, parts.batchings
    if func is None:
        from hostcallback.receiver.sinks.check import CheckSink

        places = _places(parts.params) if parts.places is None else parts.places
        return CheckSink(_template(parts, binding), unflatten, batchings, places)

    def call(arrays: Sequence[Any]) -> None:
        predicate, args, kwargs = unflatten(arrays)
        if not np.all(predicate):
            func(*args, **{**kwargs, **binding.kwargs})

    return lambda message: batches.for_each_element(message, batchings, call, most=parts.most_elements)


def _places(params: Mapping[str, Any]) -> list[CallSite]:
    places = params.get("places", [])
    if not isinstance(places, list) or len(places) > MAX_PLACES:
        raise ValueError(f"the places of a check are {str(places)[:80]}")
    return [described_place(stack, span) for stack, span in places]


def _nonfinite(parts: TapParts, binding: Binding) -> Sink | None:
    from hostcallback.receiver.sinks import nonfinite

    program = parts.params.get("program")
    if binding.func is None and program is not None:
        if type(program) is not str or len(program) > limits.LOGGER_CHARS:
            raise ValueError(f"the watched program is {str(program)[:80]!r}")
        return nonfinite.FoundSink.of_failed_calls(program)
    if binding.func is None and "found" in parts.params:
        return nonfinite.FoundSink(nonfinite.Explains.from_plain(parts.params["found"]))
    return _tap(parts, binding)


def _metrics(parts: TapParts, binding: Binding) -> Sink | None:
    # The writers of a receiver take the messages, whatever else does.
    return _unwritten if binding.func is None else _tap(parts, binding)


_told: list[Callable[[Message], bool]] = []


def tell_of_metrics(tell: Callable[[Message], bool]) -> None:
    """Calls `tell` on receiver threads with the messages of metrics until it returns True."""
    _told.append(tell)


def _unwritten(message: Message) -> None:
    if _told and _told[-1](message):
        _told.clear()


def _progress(parts: TapParts, binding: Binding) -> Sink | None:
    if binding.func is not None:
        return _tap(parts, binding)
    from hostcallback.receiver.sinks.progress.sink import ProgressSink

    return ProgressSink(parts.params, parts.unflatten, parts.batchings, is_foreign=parts.is_foreign)


def _knob(parts: TapParts, binding: Binding) -> Sink | None:
    if binding.func is not None:
        return _tap(parts, binding)
    from hostcallback.receiver.sinks.knob import KnobSink

    return KnobSink(parts.params.get("who"), parts.unflatten)


def _time(parts: TapParts, binding: Binding) -> Sink | None:
    from hostcallback.receiver.sinks.times import TimeSink

    sink = TimeSink(parts.params, parts.unflatten, binding.func is None)
    if binding.func is None:
        return sink
    func = functools.partial(binding.func, **binding.kwargs)

    def call(message: Message) -> None:
        sink(message)
        func(sink.values(message))

    return call


SINK_FACTORIES: dict[TapKind, Callable[[TapParts, Binding], Sink | None]] = {
    tap_descriptor.PRINT: _print,
    tap_descriptor.FORMAT: _format,
    tap_descriptor.CALLBACK: _callback,
    tap_descriptor.CHECK: _check,
    tap_descriptor.NONFINITE: _nonfinite,
    tap_descriptor.METRICS: _metrics,
    tap_descriptor.PROGRESS: _progress,
    tap_descriptor.KNOB: _knob,
    tap_descriptor.TIME: _time,
}
"""The functions that make the sinks of kinds. The sinks of all other kinds call a function as taps do."""


def make_sink(kind: TapKind, parts: TapParts, binding: Binding = NOTHING_BOUND) -> Sink | None:
    """Returns the sink of a tap; None if it calls a function and no function is bound.

    Raises:
        LookupError: its params do not fit its kind.
        TypeError: as above.
        ValueError: as above.
        AttributeError: as above.
    """
    sink = SINK_FACTORIES.get(kind, _tap)(parts, binding)
    if sink is None:
        return None
    return batches.masking(parts.transforms, sink if binding.around is None else binding.around(sink))


def own_sink(described: TapDescriptor) -> Sink | None:
    """Returns the sink of a tap without a binding; None if its kind needs a binding. Raises as `make_sink` does."""
    return make_sink(described.tap_kind, TapParts.of(described))


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

    __slots__ = ("_also", "_by_itself", "_mask", "_parts", "_sink", "binding", "consumer", "described")

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
        processes: str | None = None,
        apart: bool = False,
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
            processes: takes the place of the descriptor's `processes`, in readers of one process's messages.
            apart: whether each shard of a value of several processes is handed on by itself, copies too.

        Raises:
            ValueError: its params do not fit its kind.
        """
        self.described = described
        self._also = tuple(also)
        try:
            self._parts = TapParts.of(described)
            self._mask = batches.LaneMask.of(described.transforms)
            own = make_sink(described.tap_kind, self._parts)
            escaped: Callable[[], Sink] | None = getattr(own, "escaped", None) if escapes else None
            self._by_itself = (own if escaped is None else escaped()) or unbound(described)
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
                sink, "local" if apart and not assemble else described.sharding, assemble=assemble,
                processes=processes or described.processes, device_index=described.device_index,
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
            unflatten=self._parts.unflatten
            if self._mask is None
            else self._mask.unflattening(self._parts.unflatten),
        )

    @property
    def has_pending_values(self) -> bool:
        """Whether the tap has incomplete values."""
        sink = self.consumer.sink
        return isinstance(sink, AssemblingSink | ProcessShardSink) and sink.pending_values > 0

    def bind(self, binding: Binding | None) -> None:
        """Binds another function to the tap, or none."""
        self.binding = binding
        bound = None if binding is None else make_sink(self.described.tap_kind, self._parts, binding)
        self._sink = bound or self._by_itself

    def _deliver(self, message: Message) -> None:
        if self._mask is not None:
            taken = self._mask.apply(message)
            if taken is None:
                return
            message = taken
        for sink in self._also:
            sink(message)
        self._sink(message)
