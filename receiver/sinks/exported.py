"""The consumers of exported programs, whose messages carry the description of their tap.

A program that `jax.export` wrote runs in processes that never traced it. Its taps send to one of two consumers that
every process has. The first array of such a message (after the shard record, if there is one) is the description; see
`hostcallback.receiver.wire.tap_descriptor`. By the name in it the tap finds the function that was bound to it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hostcallback.receiver.errors import UnboundConsumerError
from hostcallback.receiver.messages.deferred_errors import DelegatedFailure
from hostcallback.receiver.messages.message import Consumer, Message, Sink
from hostcallback.receiver.messages.registry import Registry
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.sharding.shard_record import PLACES_FROM, says_share
from hostcallback.receiver.tap_name import base_name
from hostcallback.receiver.wire.tap_descriptor import FIRST_PROCESS, TapDescriptor

WHOLE_ID = int.from_bytes(b"exported", "little")
SHARDS_ID = int.from_bytes(b"shardsof", "little")
"""Consumer ids of the taps of exported programs: of whole arrays, and of shards."""

MAX_TAPS = 4096
"""Number of descriptions that are cached. A description beyond that is read again with its next message."""


def _unbound(described: TapDescriptor) -> Sink:
    def report(message: Message) -> None:
        raise UnboundConsumerError(
            f"messages of the exported tap {described.name!r} (exported from {described.source_line}), to which "
            f"nothing is bound in this process: hostcallback.bind({described.name!r}, function) before the program runs"
        )

    return report


def exported_tap(
    described: TapDescriptor,
    binding: Binding | None,
    is_another_receiver_busy: Callable[[], bool] = lambda: False,
) -> BoundTap:
    """Makes a tap of an exported program. A tap without a binding that neither prints nor checks raises an error."""
    return BoundTap(described, binding, unbound=_unbound, is_another_receiver_busy=is_another_receiver_busy)


def _is_shared(described: TapDescriptor) -> bool:
    # Whether the shard records say which process delivers: the first one that has the value, or the shard.
    return described.shards is not None and described.sharding == "global"


MakeTap = Callable[[TapDescriptor, Binding | None], BoundTap]


class ExportedTaps:
    """The consumers of exported programs, and the functions bound to their taps. Any thread.

    A message goes to the binding of its tap's name. Without a binding it goes to the consumer of the same tap, if this
    process has traced the tap too. Otherwise taps that print, log or check do so, and other taps raise an error.

    Attributes:
        is_first_process: whether taps with `processes="first"` deliver in this process.
    """

    def __init__(self, registry: Registry, make_tap: MakeTap = exported_tap) -> None:
        """Registers the two consumers.

        Args:
            registry: finds the consumers of taps that this process has traced.
            make_tap: makes the taps that it has not traced.
        """
        self.is_first_process = True
        self._registry = registry
        self._make_tap = make_tap
        self._lock = threading.Lock()  # protects `_bindings` and `_taps`
        self._bindings: dict[str, Binding] = {}
        # By description, and whether several processes share the values; the most recently used last.
        self._taps: OrderedDict[tuple[bytes, bool], BoundTap] = OrderedDict()
        self._leases = [
            registry.lease(Consumer(WHOLE_ID, "exported tap", "an exported program", self._deliver)),
            registry.lease(Consumer(SHARDS_ID, "exported tap", "an exported program", self._deliver_shard)),
        ]

    def bind(self, name: str, binding: Binding | None) -> None:
        """Delivers the exported taps of that name to `binding` from now on; None removes the binding.

        A value of several shards goes to the binding at the time its last shard arrives.
        """
        with self._lock:
            if binding is None:
                self._bindings.pop(name, None)
            else:
                self._bindings[name] = binding
            for tap in self._taps.values():
                if name in (tap.described.name, base_name(tap.described.name)):
                    tap.bind(self._binding_of(tap.described.name))

    def _binding_of(self, name: str) -> Binding | None:
        # The caller holds the lock. A tap without a name of the user has its line's, `print@train_step:42`.
        return self._bindings.get(name) or self._bindings.get(base_name(name))

    def _deliver(self, message: Message) -> None:
        if not message.arrays:
            raise ValueError("a message of an exported program came without the description of its tap")
        description, *arrays = message.arrays
        self._hand_on(message, self._tap_of(description.tobytes()), arrays)

    def _deliver_shard(self, message: Message) -> None:
        if len(message.arrays) < 2:
            raise ValueError(
                "a message of shards of an exported program came without its shard record or the description of its tap"
            )
        record, description, *arrays = message.arrays
        tap = self._tap_of(description.tobytes(), says_share(record, message.arrays[1:]))
        # The record has an entry for the description too, because it is one of the arrays. It is cut out here.
        record = np.concatenate([record[:PLACES_FROM], record[PLACES_FROM + 2 :]])
        self._hand_on(message, tap, [record, *arrays])

    def _hand_on(self, message: Message, tap: BoundTap, arrays: list[Any]) -> None:
        if (
            tap.described.processes == FIRST_PROCESS
            and not self.is_first_process
            and not _is_shared(tap.described)
        ):
            return
        consumer = tap.consumer
        if tap.binding is None:
            consumer = self._registry.find(tap.described.consumer_id) or consumer
        try:
            consumer.sink(message._replace(consumer=consumer, arrays=arrays))
        except BaseException as error:
            raise DelegatedFailure(consumer, error) from error

    def _tap_of(self, description: bytes, is_shared: bool = False) -> BoundTap:
        # A program may run on devices of several processes that was exported on those of one. Its records say it.
        key = description, is_shared
        with self._lock:
            tap = self._taps.get(key)
            if tap is None:
                described = TapDescriptor.unpack(description)
                if is_shared:
                    described = replace(described, shards="some")
                try:
                    tap = self._make_tap(described, self._binding_of(described.name))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise ValueError(
                        f"the exported tap {described.name!r} (exported from {described.source_line}) is described as "
                        f"of the kind {described.kind!r} with params that do not go with it: {error!r}"
                    ) from error
                if len(self._taps) >= MAX_TAPS:
                    self._forget_one()
                self._taps[key] = tap
            else:
                self._taps.move_to_end(key)
            return tap

    def _forget_one(self) -> None:
        # Drops the least recently used tap; one with incomplete values only if the 64 oldest taps all have some.
        oldest = list(itertools.islice(self._taps.items(), 64))
        idle = [key for key, tap in oldest if not tap.has_pending_values]
        del self._taps[idle[0] if idle else oldest[0][0]]
