"""A process that receives the messages of exported programs: for the tests of their sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hostcallback.receiver.errors import TapFailure, TapFunctionException
from hostcallback.receiver.failures.deferred_errors import DeferredErrors
from hostcallback.receiver.messages import Message, Registry
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID, ExportedTaps
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

TAP = TapDescriptor(
    name="loss",
    source_line="train.py:12 (step)",
    consumer_id=77,
    kind="tap",
    params={},
    kwargs={"run": 7},
    transforms=(("batch", {"batch_dims": (0, None)}), ("jvp", {})),
    tree=["dict", [["value", "x"]], [["array"]]],
    shards=None,
    sharding="global",
)


PRINT = replace(
    TAP, name="shown", kind="print", params={"threshold": 1000}, kwargs={"what": "x"}, transforms=()
)


FORMAT = replace(
    TAP,
    name="told",
    kind="format",
    kwargs={},
    transforms=(),
    tree=["tuple", [["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "x = {}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)


class Process:
    """A process that runs exported programs: their messages come to it as a dispatcher brings them."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.taps = ExportedTaps(self.registry)
        self.deferred = DeferredErrors()
        self._seq = 0

    def bring(self, consumer_id: int, arrays: list[Any], *, run_id: int = 0, device: str = "cpu:0") -> None:
        consumer = self.registry.find(consumer_id)
        assert consumer is not None
        self._seq += 1
        try:
            consumer.sink(Message(consumer, arrays, self._seq, 0, run_id, device, None))
        except BaseException as error:
            self.deferred.add_failure(
                TapFailure(error, consumer.name, consumer.source_line, device, self._seq)
            )

    def emit(self, tap: TapDescriptor, *arrays: Any, **where: Any) -> None:
        """A message of whole arrays."""
        self.bring(WHOLE_ID, [tap.pack(), *map(np.asarray, arrays)], **where)

    def emit_shard(
        self,
        tap: TapDescriptor,
        whole: list[float],
        partition: int,
        shards: int,
        occurrence: int = 0,
        **where: Any,
    ) -> None:
        """A message of one device's shard of a vector."""
        size = len(whole) // shards
        start = partition * size
        description = tap.pack()
        places = [(description.shape, [0]), ([len(whole)], [start])]
        record = np.array(shard_record(places, shards=shards, group=0, partition=partition))
        record[0] = occurrence
        part = np.asarray(whole[start : start + size])
        self.bring(SHARDS_ID, [record, description, part], device=f"cpu:{partition}", **where)

    def report(self) -> TapFunctionException | None:
        return self.deferred.take()


class Recorder:
    """A function to bind."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, arg: Any, **kwargs: Any) -> None:
        self.calls.append((arg, kwargs))
