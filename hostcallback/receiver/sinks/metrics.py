"""Writes scalars of messages as metrics, to an object with clu's `write_scalars` or to a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hostcallback.receiver.files import Closing
from hostcallback.receiver.messages import (
    NAME,
    Consumer,
    Message,
    Sink,
    StepSource,
    by_name,
    named_leaves,
    step_place,
)
from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class MetricWriter(Protocol):
    """Protocol of the writer for `metrics`: one method of clu's `MetricWriter`.

    Example:
        class Printer:
            def write_scalars(self, step, scalars):
                print(step, scalars)

        receiver.replay("run/taps", sinks=[receiver.metrics(Printer())])
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> Any:
        """Writes the numbers of one step by their names."""


class TapScalars:
    """Reads the step and the scalars of the messages of one tap."""

    def __init__(self, described: TapDescriptor) -> None:
        """Reads the tap's description."""
        self._name = described.name
        self._unflatten = tree.unflatten_with(described.tree)
        self._kind = described.tap_kind
        self.place: StepSource | None = step_place(described)

    def step(self, message: Message) -> int | None:
        """The step of a message; None if it has none."""
        place = self.place
        if place is None:
            return None
        if place.array < 0:
            return place.value
        array = message.arrays[place.array]
        return int(array) if not array.ndim and array.dtype.kind in "iu" else None

    def scalars(self, message: Message, *, means: bool = False) -> dict[str, float]:
        """The numbers of a message by name. With `means`, arrays are there too, as the means of their elements."""
        if not self._kind.has_metrics:
            return {}
        value = by_name(self._kind, self._unflatten(message.arrays))
        return {
            name: number
            for name, leaf in named_leaves(self._name, value)
            if (number := _number(_mean(leaf) if means else leaf)) is not None
            and not name.endswith(f"/{NAME}")
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


def metrics(writer: MetricWriter) -> Sink:
    """Returns a sink that writes the scalars of messages: `name` for a tap of one scalar, `name/key` in a pytree.

    Skips arrays that are not scalars, texts and failed checks. The step is the integer called `step` in the message
    (see `messages.steps`), or else the step of the last message on the same device that had one; 0 before the first.
    Several threads may call the sink; it calls the writer on one thread at a time. In a program of several processes a
    replicated scalar is written by the first process, unless its tap has `processes="all"`.

    Example:
        with receiver.JsonlWriter("scalars.jsonl") as writer, hcb.outfeed_receiver(sinks=[receiver.metrics(writer)]):
            train()
    """
    lock = threading.Lock()  # protects the writer and `steps`
    steps: dict[Any, int] = {}
    taps: dict[int, tuple[Consumer, TapScalars | None]] = {}

    def write(message: Message) -> None:
        consumer = message.consumer
        known = taps.get(id(consumer))
        if known is None or known[0] is not consumer:
            described = consumer.describe() if consumer.describe is not None else None
            known = taps[id(consumer)] = consumer, TapScalars(described) if described is not None else None
        tap = known[1]
        if tap is None:
            return
        step = tap.step(message)
        scalars = tap.scalars(message)
        with lock:
            if step is None:
                step = steps.get(message.device, 0)
            steps[message.device] = step
            if scalars:
                writer.write_scalars(step, scalars)

    return write


class JsonlWriter(Closing):
    """Writes metrics as JSON lines: `{"step": 3, "loss": 0.5}`. NaN and infinite numbers become null.

    Example:
        with receiver.JsonlWriter("scalars.jsonl") as writer:
            receiver.replay("run/taps", sinks=[receiver.metrics(writer)])
    """

    def __init__(self, file: str | os.PathLike[str] | Any) -> None:
        """Writes to `file`: a path, whose file is overwritten, or an open text file, which stays open.

        Raises:
            OSError: the file cannot be made.
        """
        self._owns = isinstance(file, str | os.PathLike)
        self._file: Any = open(file, "w", encoding="utf-8") if self._owns else file  # noqa: SIM115

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one line."""
        values = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, **values}, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        """Flushes the file's buffer to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file if this writer opened it."""
        if self._owns:
            self._file.close()
