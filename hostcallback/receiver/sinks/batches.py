"""Batches, the messages of taps under vmap: splits them into elements, and removes those that do not take part.

In a batched branch or loop not all elements take part in a tap. Its message has one array more than the tap has leaves,
the mask: bool, true for the elements that take part. The tap's transforms have an entry for it, the last one:
`("mask", {"batch_dims": levels})`, with a level for each vmap, innermost first, and in each level the axis of every
array of the message, the mask's last, as in `Batchings`.

Consumers get the elements that take part. Along the vmaps over which the mask varies a message has one batch axis: if
that is one vmap, its own axis, shortened; if there are several, a new first axis in place of theirs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.messages import Index, Message, Sink
from hostcallback.receiver.wire.array_types import MAX_RANK, Array
from hostcallback.receiver.wire.truncation import is_truncated

Transforms = Sequence[tuple[str, Mapping[str, Any]]]
Levels = tuple[tuple[int | None, ...], ...]

MASK = "mask"
BATCH = "batch"


@dataclass(frozen=True, slots=True)
class LaneMask:
    """The mask of one tap's messages.

    Attributes:
        levels: the axes of all arrays, by vmap; see the module.
    """

    levels: Levels

    @classmethod
    def of(cls, transforms: Transforms) -> LaneMask | None:
        """The mask of a tap with these transforms; None if its messages have none.

        Raises:
            ValueError: the entry, which may come from another process, is not one.
        """
        for name, params in transforms:
            if name == MASK:
                return cls(_checked(params.get("batch_dims")))
        return None

    @property
    def merged(self) -> Sequence[int]:
        """The vmaps that are merged with an outer vmap."""
        return self._masked[:-1]

    @property
    def place(self) -> int:
        """The number of the vmap over the elements that take part; the innermost vmap is 0."""
        return self._masked[-1] - len(self._masked) + 1

    @property
    def _masked(self) -> tuple[int, ...]:
        return _masked_of(self.levels)

    def _axes(self, which: int, rank: int = MAX_RANK) -> Mapping[int, int]:
        return _axes_of(self.levels, which, rank)

    def batch_dims(self, which: int) -> list[int | None]:
        """The batch axis of one array for each vmap, after the elements that do not take part were removed."""
        masked, axes = self._masked, dict(self._axes(which))
        own = [axes[level] for level in masked if level in axes]
        if len(masked) > 1:
            # Their axes become one, the first.
            axes = {
                level: axis + (1 if own else 0) - sum(one < axis for one in own)
                for level, axis in axes.items()
                if level not in masked
            }
            if own:
                axes[masked[-1]] = 0
        found = []
        for level in range(len(self.levels)):
            if level in masked[:-1]:
                continue
            axis = axes.get(level)
            further_out = [axes[outer] for outer in axes if outer > level]
            found.append(axis if axis is None else axis - sum(outer < axis for outer in further_out))
        return found

    def apply(self, message: Message) -> Message | None:
        """Returns the message with the elements that take part; None if none does.

        A message to which that was done already comes back as it is. All elements stay where no number shows which
        element it is of: in truncated arrays, and in shards that do not have the same elements as the mask's shard.
        """
        taken = self.part(message)
        elements = taken.elements
        return None if elements is not None and not len(elements[0]) else taken

    def part(self, message: Message) -> Message:
        """As `apply`, but a message without participating elements is returned with empty arrays."""
        arrays = message.arrays
        if message.elements is not None or len(arrays) != len(self.levels[0]):
            return message
        places = message.shard_index
        if is_truncated(arrays) or not self._agree(places):
            return message._replace(arrays=arrays[:-1], shard_index=places if places is None else places[:-1])
        arrays, found = self._taken(arrays)
        starts = [0] * len(found)
        if places is not None:
            axes = self._axes(-1, len(places[-1]))
            starts = [places[-1][axes[level]].start for level in self._masked]
            places = tuple(self._place(i, place, len(found[0])) for i, place in enumerate(places[:-1]))
        elements = [axis + start for axis, start in zip(found, starts, strict=True)]
        return message._replace(arrays=arrays, shard_index=places, elements=tuple(reversed(elements)))

    def _taken(self, arrays: Sequence[Array]) -> tuple[list[Array], Sequence[Array]]:
        # Returns the arrays without the other elements, and for each vmap the places of the elements that take part.
        *arrays, mask = arrays
        if len(self.levels) == 1 and mask.ndim == 1:  # by far the most
            places = mask.nonzero()
            dims = self.levels[0]
            return [
                array if dim is None else array.take(places[0], axis=dim)
                for array, dim in zip(arrays, dims, strict=False)
            ], places
        axes = self._axes(-1, mask.ndim)
        # The innermost vmap's index moves slowest, as in `elements`.
        found = np.nonzero(mask.transpose([axes[level] for level in self._masked]))
        where = dict(zip(self._masked, found, strict=True))
        return [self._part_of(i, array, where) for i, array in enumerate(arrays)], found

    def _agree(self, places: Index | None) -> bool:
        # Whether the shards have the elements of the mask's shard.
        if places is None:
            return True
        by_array = [
            {level: place[axis] for level, axis in self._axes(i, len(place)).items()}
            for i, place in enumerate(places)
        ]
        of_mask = by_array[-1]
        return all(own[level] == of_mask[level] for own in by_array for level in self._masked if level in own)

    def _part_of(self, which: int, array: Array, where: Mapping[int, Array]) -> Array:
        axes = self._axes(which, array.ndim)
        own = [level for level in where if level in axes]
        if not own:
            return array
        if len(where) == 1:
            return np.take(array, where[own[0]], axis=axes[own[0]])
        first = [axes[level] for level in own]
        rest = [axis for axis in range(array.ndim) if axis not in first]
        taken: Array = array.transpose([*first, *rest])[tuple(where[level] for level in own)]
        return taken

    def _place(self, which: int, place: tuple[slice, ...], count: int) -> tuple[slice, ...]:
        axes = self._axes(which, len(place))
        own = [axes[level] for level in self._masked if level in axes]
        if len(self._masked) == 1:
            return tuple(slice(0, count) if axis in own else part for axis, part in enumerate(place))
        rest = tuple(part for axis, part in enumerate(place) if axis not in own)
        return (slice(0, count), *rest) if own else rest

    def unflattening(self, unflatten: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """Returns an `unflatten` that takes the arrays of a message with the mask or without it."""

        def restore(arrays: Sequence[Any]) -> Any:
            if len(arrays) != len(self.levels[0]):
                return unflatten(arrays)
            is_whole = all(isinstance(array, np.ndarray) for array in arrays) and not is_truncated(arrays)
            return unflatten(self._taken(arrays)[0] if is_whole else arrays[:-1])

        return restore

    def before(self, sink: Sink) -> Sink:
        """Returns a sink that applies the mask before `sink`."""
        return _MaskedSink(sink, self)


class _MaskedSink:
    # Hands the elements that take part to a sink, and to what readers of logs ask it.

    def __init__(self, sink: Sink, mask: LaneMask) -> None:
        self._sink = sink
        self._mask = mask
        if hasattr(sink, "texts"):
            self.texts = self._texts
        if hasattr(sink, "escaped"):
            self.escaped = self._escaped

    def __call__(self, message: Message) -> Any:
        taken = self._mask.apply(message)
        return None if taken is None else self._sink(taken)

    def _texts(self, message: Message) -> list[str]:
        sink: Any = self._sink
        taken = self._mask.apply(message)
        texts: list[str] = [] if taken is None else sink.texts(taken)
        return texts

    def _escaped(self) -> _MaskedSink:
        sink: Any = self._sink
        return _MaskedSink(sink.escaped(), self._mask)


# Both are asked for every message.
@functools.lru_cache(maxsize=1024)
def _masked_of(levels: Levels) -> tuple[int, ...]:
    return tuple(level for level, dims in enumerate(levels) if dims[-1] is not None)


@functools.lru_cache(maxsize=4096)
def _axes_of(levels: Levels, which: int, rank: int) -> Mapping[int, int]:
    return batch_axes(rank, [dims[which] for dims in levels])


def masking(transforms: Transforms, sink: Sink) -> Sink:
    """Returns the sink of a tap with these transforms, given the sink of the elements that take part."""
    mask = LaneMask.of(transforms)
    return sink if mask is None else mask.before(sink)


def shown_transforms(message: Message) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns the transforms of a message as tap functions get them.

    That of a mask is `("mask", {"elements": (indices, ...)})`: an array for each vmap, the outermost first, as from
    `numpy.nonzero`, with the place in the whole batch of each element that is there.
    """
    transforms = message.consumer.transforms
    if message.elements is None:
        return transforms
    shown = {"elements": message.elements}
    return tuple((name, shown if name == MASK else params) for name, params in transforms)


def batch_axes(rank: int, dims: Sequence[int | None]) -> dict[int, int]:
    """Returns, by vmap, the axis that it added to an array of that rank.

    Args:
        rank: rank with all batch axes.
        dims: the axis of each vmap, innermost first (see `Batchings`); None for none.
    """
    axes = list(range(rank))
    # The outermost vmap's axis refers to the array as it is; without it, the next one's does.
    return {level: axes.pop(dim) for level, dim in reversed([*enumerate(dims)]) if dim is not None}


def _checked(levels: Any) -> Levels:
    found = list(levels) if isinstance(levels, list | tuple) else []
    counts = {len(dims) if isinstance(dims, list | tuple) else 0 for dims in found}
    dims = [dim for level in found if isinstance(level, list | tuple) for dim in level]
    if (
        len(counts) != 1
        or 0 in counts
        or not all(dim is None or (type(dim) is int and 0 <= dim < MAX_RANK) for dim in dims)
        or all(level[-1] is None for level in found)
    ):
        raise ValueError(f"the axes of a mask are {str(levels)[:80]}, expected a list for each vmap")
    return tuple(tuple(level) for level in found)


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
