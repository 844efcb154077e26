"""The layout of a metrics tap: which array of its messages is which metric, and which axes are vmap lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages import NAME as STEP, Message, array_names
from hostcallback.receiver.sinks.tap import batch_axes, batchings_of
from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

SCALAR, HISTOGRAM, IMAGE, TEXT = "scalar", "histogram", "image", "text"
FORMS = (SCALAR, HISTOGRAM, IMAGE, TEXT)
REDUCTIONS = ("mean", "last", "max", "min", "sum", "histogram", "each")
"""The values of `reduce`; "each" keeps lanes and devices apart and takes the last step."""
DEFAULT_REDUCTION = "mean"
BINS = 64


class Metric(NamedTuple):
    """A metric of a tap.

    Attributes:
        name: its name.
        form: one of `FORMS`.
        arrays: indices of its arrays in a message: one, or those of a text's fields.
        reduce: one of `REDUCTIONS`.
        bins: number of bins of a histogram.
        template: of a text.
    """

    name: str
    form: str
    arrays: tuple[int, ...]
    reduce: str
    bins: int = BINS
    template: str = ""


class TapLayout:
    """Reads the messages of one tap.

    Attributes:
        key: what the tap is for users, equal for its variants under transformations.
        metrics: its metrics, by the order of their names.
        every: number of steps that one record covers.
    """

    def __init__(self, described: TapDescriptor) -> None:
        """Reads a tap's description, which may come from a file.

        Raises:
            ValueError: it does not describe metrics.
        """
        params = described.params
        self.key = described.name, described.source_line
        self.every = _number(params.get("every", 1), "every")
        self._described = described
        self._unflatten = tree.unflatten_with(described.tree)
        self._dims = batchings_of(described.transforms)
        self._step = -1
        self.metrics: list[Metric] = []
        self._count = -1

    def _read(self, count: int) -> None:
        # The number of arrays is known from the first message.
        names = array_names(self._described.tap_kind, self._unflatten, count)
        self._count = count
        forms, reductions = (_dict(self._described.params.get(key, {})) for key in ("forms", "reduce"))
        if STEP in names:
            self._step = names.index(STEP)
        found: list[Metric] = []
        of_texts = {name for name, form in forms.items() if form[:1] == [TEXT]}
        for index, name in enumerate(names):
            if index == self._step or name.rpartition("/")[0] in of_texts:
                continue
            form, *rest = forms.get(name, [SCALAR])
            reduce = reductions.get(name, reductions.get("", DEFAULT_REDUCTION))
            if form not in FORMS or reduce not in REDUCTIONS:
                raise ValueError(
                    f"the metric {name!r} has the form {form!r:.80} and the reduction {reduce!r:.80}"
                )
            bins = _number(rest[0], "bins") if form == HISTOGRAM and rest else BINS
            found.append(Metric(name, form, (index,), reduce, bins))
        for name in of_texts:
            fields = [f"{name}/{place}" for place in range(len(names))]
            places = tuple(names.index(field) for field in fields if field in names)
            found.append(Metric(name, TEXT, places, "last", template=str(forms[name][1])))
        self.metrics = sorted(found)

    def take(self, message: Message) -> TakenMessages:
        """Returns the content of a message, or of a stack of them."""
        if self._count < 0:
            self._read(len(message.arrays))
        count = message.stacked or 1
        arrays: list[Array] = [
            array if message.stacked else array[np.newaxis] for array in map(np.asarray, message.arrays)
        ]
        steps = None
        if self._step >= 0:
            lanes = self._lanes(arrays[self._step], self._step)
            steps = lanes.reshape(count, -1).max(axis=1).astype(np.int64)
        values = [[self._lanes(arrays[place], place) for place in metric.arrays] for metric in self.metrics]
        return TakenMessages(count, steps, values)

    def _lanes(self, array: Array, place: int) -> Array:
        # Shape (messages, lanes, *shape): the axes of all vmaps become one, the innermost vmap's varies fastest.
        dims = [of_arrays[place] for of_arrays in self._dims]
        axes = [axis + 1 for _, axis in sorted(batch_axes(array.ndim - 1, dims).items(), reverse=True)]
        rest = [axis for axis in range(1, array.ndim) if axis not in axes]
        shape = [array.shape[axis] for axis in rest]
        lanes = math.prod(array.shape[axis] for axis in axes)
        return array.transpose([0, *axes, *rest]).reshape(array.shape[0], lanes, *shape)


class TakenMessages(NamedTuple):
    """Consecutive messages of one tap and device.

    Attributes:
        size: number of messages.
        steps: int64, shape (count,); None if the tap has no steps.
        values: for each metric its arrays, each of shape (count, lanes, *shape of the metric).
    """

    size: int
    steps: Array | None
    values: Sequence[Sequence[Array]]


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{what} is {str(value)[:80]}, expected a number from 1")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a map, got {str(value)[:80]}")
    return value
