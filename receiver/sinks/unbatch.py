"""Splits a message that vmap has batched into the elements of its batch, in the order in which JAX unrolls them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from hostcallback.receiver.messages.deferred_errors import MultipleFailures
from hostcallback.receiver.messages.message import Index, Message
from hostcallback.receiver.sinks.lane_mask import LaneMask, batch_axes as batch_axes
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.receiver.wire.truncation import is_truncated

Batchings = Sequence[Sequence[int | None]]
"""For each vmap, innermost first, the axis that it added to each array; None for an array that it did not batch. The
axis number refers to the array without the axes of the vmaps further out."""


def batchings_of(transforms: Sequence[tuple[str, Mapping[str, Any]]]) -> Batchings:
    """Returns the vmaps among the transformations of a tap, which have the format that tap functions get."""
    return [params["batch_dims"] for name, params in transforms if name == "batch"]


def elements(
    arrays: Sequence[Array], batchings: Batchings, places: Index | None = None, most: int | None = None
) -> Iterator[tuple[tuple[int, ...], Sequence[Array]]]:
    """Yields the index of each element of a batch, the outermost vmap's first, and its arrays.

    The innermost vmap's index moves slowest, because JAX unrolls that vmap first, and then each of its elements under
    the next one. An array that is not batched is repeated. All arrays are copies, so that elements share no memory.
    For shards, whose `places` in the whole arrays are given, it yields the elements that all shards have.

    Raises:
        ValueError: whole arrays disagree on the size of a batch, or it has more than `most` elements.
    """
    batched = [
        _batch_first(arrays, batchings, i, None if places is None else places[i]) for i in range(len(arrays))
    ]
    spans = [
        [axis.span(view.shape) for view, axes in batched if (axis := axes.get(level)) is not None]
        for level in range(len(batchings))
    ]
    if places is None and any(len(set(found)) > 1 for found in spans):
        raise ValueError(
            f"arrays of shapes {[array.shape for array in arrays]}, batched along {[*map(tuple, batchings)]}, are not "
            "one batch: the message was damaged or made by another version"
        )
    # A vmap may have batched no array at all, but the mask of the message: its arrays are of all of its elements.
    ranges = [
        range(max(start for start, _ in found), min(stop for _, stop in found)) if found else range(1)
        for found in spans
    ]
    count = math.prod(max(each.stop - each.start, 0) for each in ranges)
    if most is not None and count > most:
        raise ValueError(
            f"a batch of {count:,} elements came from outside this process, at most {most:,} are taken"
        )
    for index in itertools.product(*ranges):
        taken = []
        for view, axes in batched:
            where: tuple[Any, ...] = (*(index[level] - axis.start for level, axis in axes.items()), ...)
            taken.append(view[where].copy())
        yield index[::-1], taken


def elements_of(
    message: Message, batchings: Batchings, most: int | None = None
) -> Iterator[tuple[tuple[int, ...], Sequence[Array]]]:
    """Yields what `elements` does for a message; the indices are those in the whole batch, if it has only a part."""
    whole = message.elements
    mask = None if whole is None else LaneMask.of(message.consumer.transforms)
    for index, arrays in elements(message.arrays, batchings, message.shard_index, most):
        if whole is not None and mask is not None:
            place = len(index) - 1 - mask.place
            index = (*index[:place], *(int(axis[index[place]]) for axis in whole), *index[place + 1 :])
        yield index, arrays


class _BatchAxis(NamedTuple):
    position: int  # among the batch axes of its array
    start: int  # of the array's shard in the whole

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        return self.start, self.start + shape[self.position]


def _batch_first(
    arrays: Sequence[Array], batchings: Batchings, which: int, place: Sequence[slice] | None
) -> tuple[Array, dict[int, _BatchAxis]]:
    # Returns one array with its batch axes first, innermost vmap first, and by vmap the position of its axis.
    array = arrays[which]
    taken = batch_axes(array.ndim, [dims[which] for dims in batchings])
    axes = [axis for axis in range(array.ndim) if axis not in taken.values()]
    levels = sorted(taken)
    starts = [0 if place is None else place[taken[level]].start for level in levels]
    return array.transpose([*(taken[level] for level in levels), *axes]), {
        level: _BatchAxis(position, start)
        for position, (level, start) in enumerate(zip(levels, starts, strict=True))
    }


class _Delivered:
    elements = 0  # threads may lose each other's increments: a change says enough
    last: ClassVar[dict[int, float]] = {}  # by ident of a thread, when its last element began


_delivered = _Delivered()


def elements_delivered() -> int:
    """Returns a number that grows while the elements of a batch are delivered."""
    return _delivered.elements


def last_element(thread: int | None) -> float:
    """Returns the `perf_counter()` value at which a thread's last element began, by its ident; 0.0 if none did."""
    return 0.0 if thread is None else _delivered.last.get(thread, 0.0)


def for_each_element(
    message: Message,
    batchings: Batchings,
    consume: Callable[[Sequence[Array]], None],
    *,
    most: int | None = None,
) -> None:
    """Calls `consume` with the arrays of each element. An error for one element does not affect the others.

    If the arrays of the message were truncated, calls `consume` once, with the heads of the whole batch.

    Raises:
        MultipleFailures: has all errors of `consume`, each with a note that names the element.
        ValueError: the batch has more than `most` elements.
    """
    if not batchings or is_truncated(message.arrays):  # truncated arrays do not show the elements' boundaries
        consume(message.arrays)
        return
    failures: list[BaseException] = []
    here = get_ident()
    for index, element in elements_of(message, batchings, most):
        _delivered.elements += 1
        _delivered.last[here] = perf_counter()
        try:
            consume(element)
        except BaseException as error:  # a failing element must not withhold the others
            error.add_note(f"element {', '.join(map(str, index))} of the batch")
            failures.append(error)
    if failures:
        raise MultipleFailures("calls for elements of one batch failed", failures)
