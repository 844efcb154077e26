"""The sinks of a scope, which get every message of the scope in addition to the taps' sinks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.messages import Consumer, Message, Registry, Sink
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID, ExportedTaps
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.lane_mask import masking
from hostcallback.receiver.sinks.sharding.sinks import shard_sink
from hostcallback.receiver.wire.tap_descriptor import KINDS, TapDescriptor, TapKind


class ScopeSinks:
    """The sinks of one scope. Any thread.

    They get a value that is sharded over several devices as a whole, and messages of exported programs without the
    tap descriptor that each of them carries.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Delivers each message to all of `sinks`; to one with an attribute `only_kind` messages of that kind."""
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()  # protects `_by_id`, whose entries the devices share
        self._by_id: dict[int, tuple[Sink, bool]] = {}
        self._of_kind: dict[TapKind | None, Sink | None] = {}
        self._registry = Registry()
        self._exported = ExportedTaps(self._registry, self._exported_tap)

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """Returns a sink that calls the scope's sinks and `sink`, the rest of the consumer's chain."""
        found = self._sink_of(consumer)
        if found is None:
            return sink
        extra, own_first = found

        def both(message: Message) -> Any:
            errors: list[BaseException] = []
            result = None
            for is_own in (own_first, not own_first):
                # All sinks get the message, whatever the others raise.
                try:
                    if is_own:
                        result = sink(message)
                    else:
                        extra(message)
                except BaseException as error:
                    errors.append(error)
            _raise(errors)
            return result

        return both

    def _sink_of(self, consumer: Consumer) -> tuple[Sink, bool] | None:
        # Also whether the tap's own sink comes first. The scope's sinks do, because a tap function may change the
        # arrays. For sharded values the tap's sink does, because it makes devices wait that are far ahead of others.
        with self._lock:
            found = self._by_id.get(consumer.consumer_id)
            if found is None:
                found = self._new_sink(consumer)
                if found is not None:
                    self._by_id[consumer.consumer_id] = found
            return found

    def _new_sink(self, consumer: Consumer) -> tuple[Sink, bool] | None:
        if consumer.consumer_id in (WHOLE_ID, SHARDS_ID):
            exported = self._registry.find(consumer.consumer_id)
            return None if exported is None else (exported.sink, True)
        if consumer.describe is None:
            return None
        try:
            described = consumer.describe()
        except ValueError:  # the tap cannot be described, so it is not known whether it is sharded
            deliver = self._for_kind("")
            return None if deliver is None else (deliver, False)
        deliver = self._for_kind(described.kind)
        if deliver is None:
            return None
        deliver = masking(described.transforms, deliver)
        if described.shards is None:
            return deliver, False
        assemble = described.shards == "all"
        return shard_sink(
            deliver, described.sharding, assemble=assemble, processes=described.processes, waits=False
        ), True

    def _for_kind(self, kind: str) -> Sink | None:
        # Delivers to the sinks that take messages of taps of that kind; None if there are none.
        known = TapKind.named(kind) if TapKind.named(kind) in KINDS else None
        if known not in self._of_kind:
            sinks = [sink for sink in self._sinks if getattr(sink, "only_kind", known) == known]
            self._of_kind[known] = _deliver_to(sinks) if sinks else None
        return self._of_kind[known]

    def _exported_tap(self, described: TapDescriptor, binding: Binding | None) -> BoundTap:
        deliver = self._for_kind(described.kind)
        also = () if deliver is None else (deliver,)
        return BoundTap(described, Binding(_ignore), unbound=lambda tap: _ignore, waits=False, also=also)


def _deliver_to(sinks: Sequence[Sink]) -> Sink:
    def deliver(message: Message) -> None:
        errors: list[BaseException] = []
        for sink in sinks:
            try:
                sink(message)
            except BaseException as error:
                errors.append(error)
        _raise(errors)

    return deliver


def _raise(errors: list[BaseException]) -> None:
    if len(errors) > 1:
        raise MultipleFailures("several sinks of a message", errors)
    if errors:
        raise errors[0]


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
