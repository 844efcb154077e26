"""Takes a message that vmap batched apart into the elements of its batch, in the order in which JAX unrolls them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from receiver.deferred import SeveralFailures

Array = np.ndarray[Any, Any]

Batchings = Sequence[Sequence[int | None]]
"""For each vmap, innermost first, the axis it added to each array; None for an array it left alone. An axis counts
among those the array had then: those of the vmaps further out are not there yet."""


def batchings_of(transforms: Sequence[tuple[str, Any]]) -> Batchings:
    """The vmaps among the transformations of a tap, as pairs of a name and the axes."""
    return [dims for name, dims in transforms if name == "batch"]


def elements(arrays: Sequence[Array], batchings: Batchings) -> Iterator[tuple[tuple[int, ...], list[Array]]]:
    """The arrays of each element of a batch, with its index, the outermost vmap's first.

    The innermost vmap's index moves slowest: JAX unrolls that vmap first, and then each of its elements under the
    next one. An array that is not batched is repeated. All are copies, so that each element's are its own.

    Raises:
        ValueError: the arrays disagree on the size of a batch, as parts of arrays can that lie on several devices.
    """
    views, positions = zip(*(_batch_first(arrays, batchings, i) for i in range(len(arrays))), strict=True)
    sizes = [
        {view.shape[place[level]] for view, place in zip(views, positions, strict=True) if level in place}
        for level in range(len(batchings))
    ]
    if any(len(size) != 1 for size in sizes):
        raise ValueError(
            f"arrays of shapes {[array.shape for array in arrays]}, batched along {[*map(tuple, batchings)]}, are no "
            "one batch: they are parts of arrays that a compiler partitioned differently; tap with partitioned=False"
        )
    for index in itertools.product(*(range(*size) for size in sizes)):
        yield (
            index[::-1],
            [
                view[(*(index[level] for level in place), ...)].copy()
                for view, place in zip(views, positions, strict=True)
            ],
        )


def _batch_first(arrays: Sequence[Array], batchings: Batchings, which: int) -> tuple[Array, dict[int, int]]:
    # One array with its batch axes in front, innermost vmap first, and where each vmap's axis is among them.
    array = arrays[which]
    axes = list(range(array.ndim))
    # The outermost vmap's axis refers to the array as it is; without it, the next one's does.
    taken = {
        level: axes.pop(dim)
        for level, dim in reversed([(level, dims[which]) for level, dims in enumerate(batchings)])
        if dim is not None
    }
    levels = sorted(taken)
    return array.transpose([*(taken[level] for level in levels), *axes]), {
        level: place for place, level in enumerate(levels)
    }


def for_each_element(
    arrays: list[Array], batchings: Batchings, consume: Callable[[list[Array]], None]
) -> None:
    """Calls `consume` with the arrays of each element; what it raises for one does not keep it from the others.

    Raises:
        SeveralFailures: everything that `consume` raised, each with a note that names the element.
    """
    if not batchings:
        consume(arrays)
        return
    failures: list[BaseException] = []
    for index, element in elements(arrays, batchings):
        try:
            consume(element)
        except BaseException as error:  # whatever it is, the other elements have their turn
            error.add_note(f"element {', '.join(map(str, index))} of the batch")
            failures.append(error)
    if failures:
        raise SeveralFailures("calls for elements of one batch failed", failures)
