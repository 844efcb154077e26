"""The sink of calls: calls a host function and checks the shapes and dtypes of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcallback.receiver.errors import CallResultError
from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.wire.dtypes import Array, Dtype

_NARROW = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}

# Python's numbers have no dtype. Each may become any dtype of these kinds that can hold it.
_KINDS: dict[type, str] = {bool: "b", int: "iufc", float: "fc", complex: "c"}


@dataclass(frozen=True, slots=True)
class Expected:
    """One array that a host function must return.

    Attributes:
        name: name in reports, such as `result['x']`.
        shape: shape without the leading batch dimensions of vmap.
        dtype: exact dtype; see `CallSink` for the exceptions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype


class CallSink:
    """Makes the results of one call: contiguous arrays of the expected shapes and dtypes.

    Python numbers take the expected dtype. If the program has no 64-bit dtypes, 64-bit results become 32-bit ones.
    """

    __slots__ = ("_expected", "_flatten", "_host_func", "_narrow", "_what")

    def __init__(
        self,
        host_func: Callable[[Message], Any],
        flatten: Callable[[Any], Sequence[Any]],
        expected: Sequence[Expected],
        *,
        what: str,
        narrow: bool,
    ) -> None:
        """Makes the sink of one call.

        Args:
            host_func: makes the result of a message.
            flatten: returns the leaves of a result; raises CallResultError if its structure is not the announced one.
            expected: the expected leaves.
            what: name of the call in reports.
            narrow: whether 64-bit results become 32-bit ones.
        """
        self._host_func = host_func
        self._flatten = flatten
        self._expected = tuple(expected)
        self._what = what
        self._narrow = narrow

    def __call__(self, message: Message) -> list[Array]:
        """Calls the host function.

        Raises:
            CallResultError: its result differs from the announced one.
            BaseException: the exception of the host function.
        """
        leaves = self._flatten(self._host_func(message))
        batch = _batch_shape(message)
        return [
            self._check(leaf, expected, (*batch, *expected.shape))
            for leaf, expected in zip(leaves, self._expected, strict=True)
        ]

    def _check(self, leaf: Any, expected: Expected, shape: tuple[int, ...]) -> Array:
        dtype = expected.dtype
        kinds = _KINDS.get(type(leaf))
        if kinds is not None and not shape and (dtype.kind in kinds or (dtype.kind == "V" and "f" in kinds)):
            try:
                return np.asarray(leaf, dtype)
            except OverflowError as error:
                raise CallResultError(
                    f"{self._what}: the host function returned {leaf} as {expected.name}, expected a "
                    f"{dtype}, which cannot "
                    "hold it: return a number in its range, or announce a wider dtype in result_shape"
                ) from error
        try:
            array = np.asarray(leaf, order="C")
        except Exception as error:
            raise self._mismatch(
                expected, shape, f"a {type(leaf).__qualname__}, which is not an array"
            ) from error
        if array.shape != shape:
            raise self._mismatch(expected, shape, f"{array.dtype}{list(array.shape)}")
        if array.dtype == dtype:
            return array
        if array.dtype.newbyteorder("=") == dtype:
            return array.astype(dtype)
        if self._narrow and _NARROW.get(array.dtype) == dtype:
            narrowed = array.astype(dtype)
            if dtype.kind in "iu" and not np.array_equal(narrowed, array):
                raise CallResultError(
                    f"{self._what}: the host function returned values as {expected.name} that {dtype} "
                    "cannot hold: return "
                    "smaller ones, or enable 64-bit dtypes (jax_enable_x64) and announce one in result_shape"
                )
            return narrowed
        raise self._mismatch(expected, shape, f"{array.dtype}{list(array.shape)}")

    def _mismatch(self, expected: Expected, shape: tuple[int, ...], got: str) -> CallResultError:
        batched = ""
        if len(shape) > len(expected.shape):
            batched = " (the leading dimensions are vmap's: the host function got its arguments with them)"
        return CallResultError(
            f"{self._what}: the host function returned {got} as {expected.name}, expected "
            f"{expected.dtype}{list(shape)}{batched}: make it return that, such as with numpy.asarray(x, "
            f"numpy.{expected.dtype}), or announce what it returns in result_shape"
        )


def _batch_shape(message: Message) -> tuple[int, ...]:
    # Each transformation adds one leading dimension to every array, of size 1 if the array is not batched.
    count = len(message.consumer.transforms)
    return tuple(
        next((array.shape[axis] for array in message.arrays if array.shape[axis] != 1), 1)
        for axis in range(count)
    )
