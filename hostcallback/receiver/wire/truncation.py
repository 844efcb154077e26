"""Truncated arrays: the first elements of arrays that a rule truncated, and the shape record of the whole arrays.

A message with the flag TRUNCATED starts with a shape record, int64: for every other array its rank, then its
dimensions. Of an array with more elements than the rule's limit, the message has the first ones in row-major order, in
one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.errors import CorruptFrameError
from hostcallback.receiver.wire.array_types import Array

Shape = tuple[int, ...]


class TruncatedArray(np.ndarray[Any, Any]):
    """The first elements of an array that a rule truncated, in row-major order; its texts say so.

    Results computed from it are plain arrays.

    Attributes:
        whole_shape: shape of the tapped array; for a stack of several messages' elements, which has two dimensions, of
            the last one's. None for a part of a truncated array.

    Example:
        hcb.taps["grads"].truncate(2)
        hcb.tap(lambda value: print(value, value.whole_shape), x, name="grads")
    """

    whole_shape: Shape | None

    def __array_finalize__(self, source: Any) -> None:
        """Makes a view of a part of a truncated array a plain one."""
        self.whole_shape = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Makes results of functions plain arrays."""
        return array[()] if return_scalar else np.asarray(array)

    def __str__(self) -> str:
        """The elements, after their number and the whole shape."""
        return f"{self.label}{np.asarray(self)!s}"

    def __repr__(self) -> str:
        """As `str`, with the elements as numpy represents them."""
        return f"{self.label}{np.asarray(self)!r}"

    def __reduce__(self) -> Any:
        """Pickles the array together with its whole shape."""
        return head_of, (np.asarray(self), self.whole_shape)

    def __copy__(self) -> TruncatedArray:
        """Copies the elements, and keeps the whole shape."""
        return head_of(np.array(self), self.whole_shape)

    def __deepcopy__(self, memo: object) -> TruncatedArray:
        """As a copy: the elements refer to nothing."""
        return self.__copy__()

    @property
    def label(self) -> str:
        """Prefix of its texts: `first 8 of (128, 64): `."""
        if self.whole_shape is None:
            return ""
        each = " each" if self.ndim > 1 else ""
        return f"first {self.shape[-1]} of {self.whole_shape}{each}: "


def head_of(elements: Array, whole_shape: Shape | None) -> TruncatedArray:
    """Marks elements as those of a truncated array; the memory is shared."""
    head = elements.view(TruncatedArray)
    head.whole_shape = whole_shape
    return head


def is_truncated(arrays: Sequence[Any]) -> bool:
    """Whether any of the arrays is truncated."""
    return any(isinstance(array, TruncatedArray) for array in arrays)


def stack_of_one(array: Array) -> Array:
    """Adds a new first axis of length 1; the memory is shared."""
    stack = array[None]
    return head_of(stack, array.whole_shape) if isinstance(array, TruncatedArray) else stack


def shape_record(shapes: Sequence[Shape]) -> Array:
    """Creates the shape record of arrays of these shapes: int64, one dimension."""
    return np.array([number for shape in shapes for number in (len(shape), *shape)], np.int64)


def row(stack: Array, index: int) -> Array:
    """Returns one message's array of a stack; the memory is shared."""
    array = stack[index]
    return head_of(array, stack.whole_shape) if isinstance(stack, TruncatedArray) else array


def encode_truncated(arrays: Sequence[Array]) -> tuple[list[Array], bool]:
    """Prepares arrays for sending, and tells whether any is truncated. Reversed by `split_truncated`."""
    if not is_truncated(arrays):
        return list(arrays), False
    shapes = [(a.whole_shape if isinstance(a, TruncatedArray) else None) or a.shape for a in arrays]
    return [shape_record(shapes), *map(np.asarray, arrays)], True


def cut(array: Array, elements: int) -> Array:
    """Returns the array, or a copy of its first elements, in one dimension, if it has more."""
    return array if array.size <= elements else array.reshape(-1)[:elements].copy()


def head(array: Array, elements: int) -> Array:
    """Returns the array, or its first elements as a truncated one if it has more."""
    if array.size <= elements:
        return array
    whole = array.whole_shape if isinstance(array, TruncatedArray) else None
    return head_of(cut(np.asarray(array), elements), whole or array.shape)


def split_truncated(arrays: Sequence[Array], stacked: int) -> list[Array]:
    """Splits the shape record off the arrays of a truncated message.

    Args:
        arrays: as they were decoded.
        stacked: number of messages that they are stacks of, with the shapes of the last one; 0 for a single message.

    Returns:
        The other arrays; those with fewer elements than their shapes are `TruncatedArray`.

    Raises:
        CorruptFrameError: the first array is not a shape record of the others.
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
