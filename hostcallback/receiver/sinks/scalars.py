"""The scalars of any tap's messages by name, and the sink that writes them with a writer of `hcb.metrics`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from hostcallback.receiver import messages
from hostcallback.receiver.sinks.metric_writers.files import csv, jsonl
from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord, RecordWriter
from hostcallback.receiver.wire import pytree as tree, tap_descriptor


class TapScalars:
    """Reads the step and the scalars of the messages of one tap."""

    def __init__(self, described: tap_descriptor.TapDescriptor) -> None:
        """Reads the tap's description."""
        self._name = described.name
        self._unflatten = tree.unflatten_with(described.tree)
        self._kind = described.tap_kind
        self.place: messages.StepSource | None = messages.step_place(described)

    def step(self, message: messages.Message) -> int | None:
        """The step of a message; None if it has none."""
        return None if self.place is None else self.place.read(message.arrays)

    def scalars(self, message: messages.Message, *, means: bool = False) -> dict[str, float]:
        """The scalars of a message by name. With `means`, arrays are included, as the mean of their elements."""
        if not self._kind.has_metrics:
            return {}
        value = messages.by_name(self._kind, self._unflatten(message.arrays))
        step = None if self.place is None else self.place.array_in(message.arrays)
        return {
            name: number
            for name, leaf in messages.named_leaves(self._name, value)
            if leaf is not step and (number := _number(_mean(leaf) if means else leaf)) is not None
        }


def _mean(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or not leaf.ndim or not leaf.size or leaf.dtype.kind in "cOSUM":
        return leaf
    try:
        return float(leaf.astype(np.float64, copy=False).mean())
    except (TypeError, ValueError):
        return leaf


def _number(leaf: Any) -> float | None:
    if isinstance(leaf, np.ndarray):
        if leaf.ndim or leaf.dtype.kind in "cOSUM":
            return None
        try:
            return float(leaf)
        except (TypeError, ValueError):  # a dtype without a conversion, such as a structured one
            return None
    return float(leaf) if type(leaf) in (int, float) else None


class ScalarsSink:
    """Writes the scalars of all messages with a writer of metrics: `name` for a tap of one scalar, else `name/key`.

    A record per message. Arrays that are not scalars, texts and failed checks are left out. The step is that of the
    message (see `messages.steps`), or else of the last message on the same device that had one; 0 before the first.
    Any thread. Of a program of several processes, the first one writes a replicated scalar.

    Attributes:
        written: number of scalars by name.
    """

    def __init__(self, writer: RecordWriter) -> None:
        """`writer` is open, and stays so."""
        self.written: Counter[str] = Counter()
        self._writer = writer
        self._lock = threading.Lock()  # protects the writer and everything else
        self._steps: dict[Any, int] = {}
        self._taps: dict[int, tuple[messages.Consumer, TapScalars | None]] = {}

    def __call__(self, message: messages.Message) -> None:
        """Takes a message."""
        with self._lock:
            tap = self._tap_of(message.consumer)
            if tap is None:
                return
            step = tap.step(message)
            if step is None:
                step = self._steps.get(message.device, 0)
            self._steps[message.device] = step
            scalars = tap.scalars(message)
            self.written.update(scalars.keys())
            if scalars:
                self._writer.write(MetricRecord(step, message.time_ns, scalars))

    def _tap_of(self, consumer: messages.Consumer) -> TapScalars | None:
        known = self._taps.get(id(consumer))
        if known is None or known[0] is not consumer:
            described = consumer.describe() if consumer.describe is not None else None
            known = self._taps[id(consumer)] = consumer, None if described is None else TapScalars(described)
        return known[1]


@contextlib.contextmanager
def scalars_into(file: str | os.PathLike[str]) -> Iterator[ScalarsSink]:
    """Returns a sink that writes a new file: CSV if its name ends in `.csv`, else JSON lines.

    Raises:
        OSError: (on entering) the file cannot be made.
    """
    writer = csv(file) if str(file).endswith(".csv") else jsonl(file)
    writer.open()
    try:
        yield ScalarsSink(writer)
        writer.flush()
    finally:
        writer.close()
