"""The sink of progress messages: moves the bars of their loops, and tells readers of logs their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.messages import Message, device_text
from hostcallback.receiver.sinks.batches import Batchings, elements_of
from hostcallback.receiver.sinks.progress.bars import Bars, Look, Phase, Place, Step, bars, value_text
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.text import printable

MAX_LANES = 8
"""Largest number of elements of a vmap that have a bar each. More of them share one."""

STEP_LEAVES = (1, 2)
"""The places of the step and the total among the leaves of a message."""


class ProgressSink:
    """Moves the bars of one loop."""

    __slots__ = ("_bars", "_batchings", "_desc", "_is_foreign", "_key", "_look", "_unflatten")

    def __init__(
        self,
        params: Mapping[str, Any],
        unflatten: Unflatten,
        batchings: Batchings,
        *,
        is_foreign: bool = False,
        shown: Bars = bars,
    ) -> None:
        """Makes the sink of one tap.

        Args:
            params: `key`, which loops of a program do not share, and the look of the bar.
            unflatten: makes `(phase, step, total, postfix)` from the arrays of a message.
            batchings: the vmaps around the tap, see `batches.Batchings`.
            is_foreign: whether another process described the tap.
            shown: the bars to move.

        Raises:
            KeyError: a parameter is missing.
            ValueError: a parameter is of another type.
        """
        texts = {name: params[name] or "" for name in ("key", "desc", "unit", "display")}
        for name, text in texts.items():
            if type(text) is not str or (is_foreign and len(text) > limits.LOGGER_CHARS):
                raise ValueError(f"the {name} of a progress bar is {str(text)[:80]!r}, expected a short text")
        # A template of tqdm and rich: what a terminal or they would obey is escaped.
        texts = {name: printable(text) for name, text in texts.items()}
        self._look = Look(texts["desc"], texts["unit"], texts["display"], bool(params["leave"]))
        self._key = texts["key"]
        self._unflatten = unflatten
        self._batchings = batchings
        self._is_foreign = is_foreign
        self._bars = shown

    def texts(self, message: Message) -> list[str]:
        """Returns the text of a message, a line for each bar: `train: 400/1000 loss=0.3`."""
        lines = []
        for lane, step in self._steps(message):
            names = [self._look.desc or "progress", *([f"[{', '.join(map(str, lane))}]"] if lane else [])]
            total = "" if step.total is None else f"/{step.total}"
            values = [f"{name}={value_text(value)}" for name, value in step.postfix.items()]
            ending = ["(stopped)" if step.is_stopped else "(ended)"] if step.phase is Phase.END else []
            lines.append(" ".join([" ".join(names) + ":", f"{step.step}{total}", *values, *ending]))
        return lines

    def __call__(self, message: Message) -> None:
        """Moves the bars of one message."""
        # A program that the compiler partitions has one bar. Its devices send the same steps.
        device = device_text(message.device) if message.shard_index is None else ""
        sender = device_text(message.device)
        # Messages of shards through Python have a number per tap in place of the launch.
        run_id = message.run_id if message.shard_index is None else 0
        for lane, step in self._steps(message):
            place = Place(self._key, device, lane)
            self._bars.take(place, self._look, run_id, step, sender, message.time_ns)

    def _steps(self, message: Message) -> Iterator[tuple[tuple[int, ...], Step]]:
        arrays = message.arrays
        apart = any(dims[leaf] is not None for dims in self._batchings for leaf in STEP_LEAVES)
        if apart:
            parts = [*elements_of(message, self._batchings, limits.BATCH_ELEMENTS)]
            if len(parts) <= MAX_LANES:
                for lane, part in parts:
                    yield lane, _step(self._unflatten(part), _value)
                return
        phase, step, total, postfix = self._unflatten(arrays)
        # All elements share a bar: it is as far as the last of them.
        merged = _step((np.min(phase), np.min(step), np.max(total), postfix), _merged)
        yield (), merged


def _step(parts: Sequence[Any], value_of: Callable[[Any], Any]) -> Step:
    phase, step, total, postfix = parts
    total = int(total)
    shown = {printable(str(name)): value_of(value) for name, value in dict(postfix).items()}
    return Step(Phase(int(phase)), int(step), None if total < 0 else total, shown)


def _value(value: Any) -> Any:
    return value


def _merged(value: Any) -> Any:
    value = np.asarray(value)
    if value.ndim == 0 or value.size < 2 or value.dtype.kind not in "fiu":
        return value
    return f"{np.mean(value):.4g} ({np.min(value):.4g} to {np.max(value):.4g})"
