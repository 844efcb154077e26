"""The sinks of a scope, which get every message of the scope in addition to the taps' sinks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hostcallback.receiver.messages.deferred_errors import MultipleFailures
from hostcallback.receiver.messages.message import Consumer, Message, Sink
from hostcallback.receiver.messages.registry import Registry
from hostcallback.receiver.sinks.exported import SHARDS_ID, WHOLE_ID, ExportedTaps
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.sharding.sinks import shard_sink
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class ScopeSinks:
    """The sinks of one scope. Any thread.

    They get a value that is sharded over several devices as a whole, and messages of exported programs without the
    tap descriptor that each of them carries.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Delivers each message to all of `sinks`."""
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()  # protects `_by_id`, whose entries the devices share
        self._by_id: dict[int, Sink] = {}
        self._registry = Registry()
        self._exported = ExportedTaps(self._registry, self._exported_tap)

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """Returns a sink that calls the scope's sinks and `sink`, the rest of the consumer's chain."""
        extra = self._sink_of(consumer)
        if extra is None:
            return sink

        # The scope's sinks come first, because a tap function may change the arrays. For sharded values the tap's sink
        # comes first, because it makes devices wait that are far ahead of others.
        own_first = extra != self._deliver

        def both(message: Message) -> Any:
            errors: list[BaseException] = []
            result = None
            for is_own in (own_first, not own_first):
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

    def _sink_of(self, consumer: Consumer) -> Sink | None:
        with self._lock:
            sink = self._by_id.get(consumer.consumer_id)
            if sink is None:
                sink = self._new_sink(consumer)
                if sink is not None:
                    self._by_id[consumer.consumer_id] = sink
            return sink

    def _new_sink(self, consumer: Consumer) -> Sink | None:
        if consumer.consumer_id in (WHOLE_ID, SHARDS_ID):
            exported = self._registry.find(consumer.consumer_id)
            return None if exported is None else exported.sink
        if consumer.describe is None:
            return None
        try:
            described = consumer.describe()
        except ValueError:
            return self._deliver  # the tap cannot be described, so it is not known whether it is sharded
        if described.shards is None:
            return self._deliver
        assemble = described.shards == "all"
        return shard_sink(
            self._deliver, described.sharding, assemble=assemble, processes=described.processes, waits=False
        )

    def _exported_tap(self, described: TapDescriptor, binding: Binding | None) -> BoundTap:
        return BoundTap(
            described, Binding(_ignore), unbound=lambda tap: _ignore, waits=False, also=(self._deliver,)
        )

    def _deliver(self, message: Message) -> None:
        errors: list[BaseException] = []
        for sink in self._sinks:
            try:
                sink(message)
            except BaseException as error:
                errors.append(error)
        _raise(errors)


def _raise(errors: list[BaseException]) -> None:
    if len(errors) > 1:
        raise MultipleFailures("several sinks of a message", errors)
    if errors:
        raise errors[0]


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
