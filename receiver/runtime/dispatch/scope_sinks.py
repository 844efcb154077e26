"""The sinks of a scope: they get every message of it, from every tap, as well as the taps' own sinks."""

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

    They get whole values where those lie on several devices, and messages of exported programs without the description
    that these bring along.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """`sinks` get the messages as well as the taps' own sinks."""
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()  # protects the table, of which devices share the entries
        self._by_id: dict[int, Sink] = {}
        self._registry = Registry()
        self._exported = ExportedTaps(self._registry, self._exported_tap)

    def link(self, consumer: Consumer, sink: Sink) -> Sink:
        """These sinks and then `sink`, the rest of the chain of the consumer's messages."""
        extra = self._sink_of(consumer)
        if extra is None:
            return sink

        # A tap function may change the arrays: the others come first. But it is the tap's own sink that has devices
        # wait that are far ahead of those whose shards it wants.
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
            return self._deliver  # nobody can tell more of it
        if described.shards is None:
            return self._deliver
        return shard_sink(self._deliver, described.sharding, assemble=described.shards == "all", waits=False)

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
