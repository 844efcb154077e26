"""The vmap lanes in a message of metrics: puts them on one axis, and tells which of them send which step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hostcallback.receiver.sinks import batches
from hostcallback.receiver.wire.array_types import Array

Dims = Sequence[int | None]
"""The axis of each vmap in one array, innermost first, as in `batches.Batchings`."""
Spans = Sequence[range | None]
"""The lanes that an array has of each vmap, outermost first; None for a vmap that did not batch it."""


class StepLanes(NamedTuple):
    """The lanes of one message that send one step.

    Attributes:
        step: the step.
        lanes: for each array the numbers of its lanes, ascending.
    """

    step: int
    lanes: Sequence[Array]


def on_one_axis(array: Array, dims: Dims) -> Array:
    """Returns a stack of messages, (messages, *shape), as (messages, lanes, *rest of the shape).

    The axes of all vmaps become one, the innermost vmap's varies fastest.
    """
    found = sorted(batches.batch_axes(array.ndim - 1, dims).items(), reverse=True)
    axes = [axis + 1 for _, axis in found]
    rest = [axis for axis in range(1, array.ndim) if axis not in axes]
    shape = [array.shape[axis] for axis in rest]
    lanes = math.prod(array.shape[axis] for axis in axes)
    return array.transpose([0, *axes, *rest]).reshape(array.shape[0], lanes, *shape)


def spans_of(shape: Sequence[int], dims: Dims, place: Sequence[slice] | None) -> Spans:
    """Returns the lanes of an array. Its place in the whole array is None if it is whole."""
    axes = batches.batch_axes(len(shape), dims)
    found: list[range | None] = []
    for level in reversed(range(len(dims))):
        axis = axes.get(level)
        start = 0 if axis is None or place is None else place[axis].start or 0
        found.append(None if axis is None else range(start, start + shape[axis]))
    return found


def by_step(steps: Array, of_steps: Spans, arrays: Sequence[Spans]) -> list[StepLanes] | None:
    """Returns the lanes of one message by step, in the order of the steps.

    An array that a vmap did not batch has the same value in all lanes of that vmap: each step gets it once.

    Args:
        steps: the steps on one axis, integers.
        of_steps: the lanes of them.
        arrays: the lanes of each array.

    Returns:
        None if an array has no lane of one of the steps: a shard of other lanes than that of the steps.
    """
    found, groups = np.unique(steps, return_inverse=True)
    groups = groups.reshape(_shape(of_steps))
    numbers = [_lanes_by_group(groups, len(found), of_steps, spans) for spans in arrays]
    if any(not len(lanes) for of_array in numbers for lanes in of_array):
        return None
    return [
        StepLanes(step, [of_array[group] for of_array in numbers])
        for group, step in enumerate(found.tolist())
    ]


def _lanes_by_group(groups: Array, count: int, of_steps: Spans, spans: Spans) -> list[Array]:
    shape = _shape(spans)
    total = math.prod(shape)
    numbers = np.arange(total).reshape(shape)
    both = [*zip(of_steps, spans, strict=True)]
    groups = groups[tuple(_common(own, other) for own, other in both)]
    numbers = numbers[tuple(_common(own, other) for other, own in both)]
    # Each pair of a group and a lane once, sorted by group.
    pairs = np.unique(groups * total + numbers)
    ends = np.searchsorted(pairs, np.arange(1, count) * total)
    return [lanes % total for lanes in np.split(pairs, ends)]


def _shape(spans: Spans) -> list[int]:
    return [1 if span is None else len(span) for span in spans]


def _common(own: range | None, other: range | None) -> slice:
    # The part of its axis of which the other array has the lanes, too.
    if own is None or other is None:
        return slice(None)
    start = max(own.start, other.start)
    return slice(start - own.start, max(start, min(own.stop, other.stop)) - own.start)
