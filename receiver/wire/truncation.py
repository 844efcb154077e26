"""Heads: the first elements of arrays that a rule truncated, and the shape record that tells the arrays' shapes.

A message with the flag TRUNCATED begins with a shape record, int64: for every other array its rank, then its
dimensions. An array that had more elements than were wanted comes as its first ones in row-major order, in one
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from receiver.wire import CorruptFrameError
from receiver.wire.dtypes import Array

Shape = tuple[int, ...]


class TruncatedArray(np.ndarray[Any, Any]):
    """The first elements of an array that a rule truncated, in row-major order; texts of it say so.

    What is computed from it is a plain array.

    Attributes:
        whole_shape: of the array that was tapped; of the last one if this is a stack of several messages' heads, which
            has two dimensions. None for a part of a head.
    """

    whole_shape: Shape | None

    def __array_finalize__(self, source: Any) -> None:
        """A view of a part of a head is none."""
        self.whole_shape = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Results of functions are plain."""
        return array[()] if return_scalar else np.asarray(array)

    def __str__(self) -> str:
        """The elements, after how many of how many they are."""
        return f"{self.label}{np.asarray(self)!s}"

    def __repr__(self) -> str:
        """As `str`, with the elements as numpy represents them."""
        return f"{self.label}{np.asarray(self)!r}"

    def __reduce__(self) -> Any:
        """Heads are pickled whole."""
        return head_of, (np.asarray(self), self.whole_shape)

    @property
    def label(self) -> str:
        """What texts begin with: `first 8 of (128, 64): `."""
        if self.whole_shape is None:
            return ""
        each = " each" if self.ndim > 1 else ""
        return f"first {self.shape[-1]} of {self.whole_shape}{each}: "


def head_of(elements: Array, whole_shape: Shape | None) -> TruncatedArray:
    """The head with these elements, which it shares."""
    head = elements.view(TruncatedArray)
    head.whole_shape = whole_shape
    return head


def is_truncated(arrays: Sequence[Any]) -> bool:
    """Whether there is a head among them."""
    return any(isinstance(array, TruncatedArray) for array in arrays)


def stack_of_one(array: Array) -> Array:
    """The array with a new first axis."""
    stack = array[None]
    return head_of(stack, array.whole_shape) if isinstance(array, TruncatedArray) else stack


def shape_record(shapes: Sequence[Shape]) -> Array:
    """The shape record of arrays of these shapes."""
    return np.array([number for shape in shapes for number in (len(shape), *shape)], np.int64)


def row(stack: Array, index: int) -> Array:
    """One message's array out of a stack."""
    array = stack[index]
    return head_of(array, stack.whole_shape) if isinstance(stack, TruncatedArray) else array


def encode_truncated(arrays: Sequence[Array]) -> tuple[list[Array], bool]:
    """The arrays of a message as they are sent, and whether they are truncated: `split_truncated` takes them apart."""
    if not is_truncated(arrays):
        return list(arrays), False
    shapes = [(a.whole_shape if isinstance(a, TruncatedArray) else None) or a.shape for a in arrays]
    return [shape_record(shapes), *map(np.asarray, arrays)], True


def cut(array: Array, elements: int) -> Array:
    """The array, or its first elements in a copy if it has more."""
    return array if array.size <= elements else array.reshape(-1)[:elements].copy()


def split_truncated(arrays: Sequence[Array], stacked: int) -> list[Array]:
    """The arrays of a truncated message, without its shape record.

    Args:
        arrays: as they were decoded.
        stacked: of how many messages they are stacks, with the shapes of the last one; 0 for one message as it is.

    Raises:
        CorruptFrameError: the first array is no shape record of the others.
    """
    if not arrays:
        raise _no_record("no arrays")
    record, *parts = arrays
    numbers = (record[-1] if stacked else record).reshape(-1).tolist()
    taken, at = [], 0
    for part in parts:
        rank = int(numbers[at]) if at < len(numbers) else -1
        shape = tuple(numbers[at + 1 : at + 1 + rank])
        at += 1 + rank
        if rank < 0 or at > len(numbers) or any(type(dim) is not int or dim < 0 for dim in shape):
            raise _no_record(f"the numbers {numbers}")
        own = part.shape[1:] if stacked else part.shape
        taken.append(part if own == shape else head_of(part, shape))
    if at != len(numbers):
        raise _no_record(f"the numbers {numbers}")
    return taken


def _no_record(what: str) -> CorruptFrameError:
    return CorruptFrameError(
        f"a truncated message came with {what} where its shape record was expected; it was overwritten or its writer "
        "is broken: discard it"
    )
