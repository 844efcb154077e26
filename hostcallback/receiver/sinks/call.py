"""The sinks of calls, and the consumers of exported programs, whose messages carry the description of their tap.

A program that `jax.export` wrote runs in processes that never traced it. Its taps send to one of two consumers that
every process has. The first array of such a message (after the shard record, if there is one) is the description; see
`hostcallback.receiver.wire.tap_descriptor`. By the name in it the tap finds the function that was bound to it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hostcallback.receiver.errors import CallResultError, UnboundConsumerError
from hostcallback.receiver.failures.deferred_errors import DelegatedFailure
from hostcallback.receiver.messages import Consumer, Message, Registry, Sink
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.sinks.sharding.shard_record import PLACES_FROM, says_share
from hostcallback.receiver.tap_arguments import base_name
from hostcallback.receiver.wire.array_types import Array, Dtype
from hostcallback.receiver.wire.tap_descriptor import FIRST_PROCESS, TapDescriptor

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


WHOLE_ID = int.from_bytes(b"exported", "little")
SHARDS_ID = int.from_bytes(b"shardsof", "little")
"""Consumer ids of the taps of exported programs: of whole arrays, and of shards."""

MAX_TAPS = 4096
"""Number of descriptions that are cached. A description beyond that is read again with its next message."""


def _unbound(described: TapDescriptor) -> Sink:
    def report(message: Message) -> None:
        raise UnboundConsumerError(
            f"messages of the exported tap {described.name!r} (exported from {described.source_line}), to which "
            f"nothing is bound in this process: hostcallback.bind({described.name!r}, function) before the program runs"
        )

    return report


def exported_tap(
    described: TapDescriptor,
    binding: Binding | None,
    is_another_receiver_busy: Callable[[], bool] = lambda: False,
) -> BoundTap:
    """Makes a tap of an exported program. A tap without a binding that neither prints nor checks raises an error."""
    return BoundTap(described, binding, unbound=_unbound, is_another_receiver_busy=is_another_receiver_busy)


def _is_shared(described: TapDescriptor) -> bool:
    # Whether the shard records say which process delivers: the first one that has the value, or the shard.
    return described.shards is not None and described.sharding == "global"


MakeTap = Callable[[TapDescriptor, Binding | None], BoundTap]


class ExportedTaps:
    """The consumers of exported programs, and the functions bound to their taps. Any thread.

    A message goes to the binding of its tap's name. Without a binding it goes to the consumer of the same tap, if this
    process has traced the tap too. Otherwise taps that print, log or check do so, and other taps raise an error.

    Attributes:
        is_first_process: whether taps with `processes="first"` deliver in this process.
    """

    def __init__(self, registry: Registry, make_tap: MakeTap = exported_tap) -> None:
        """Registers the two consumers.

        Args:
            registry: finds the consumers of taps that this process has traced.
            make_tap: makes the taps that it has not traced.
        """
        self.is_first_process = True
        self._registry = registry
        self._make_tap = make_tap
        self._lock = threading.Lock()  # protects `_bindings` and `_taps`
        self._bindings: dict[str, Binding] = {}
        # By description, and whether several processes share the values; the most recently used last.
        self._taps: OrderedDict[tuple[bytes, bool], BoundTap] = OrderedDict()
        self._leases = [
            registry.lease(Consumer(WHOLE_ID, "exported tap", "an exported program", self._deliver)),
            registry.lease(Consumer(SHARDS_ID, "exported tap", "an exported program", self._deliver_shard)),
        ]

    def bind(self, name: str, binding: Binding | None) -> None:
        """Delivers the exported taps of that name to `binding` from now on; None removes the binding.

        A value of several shards goes to the binding at the time its last shard arrives.
        """
        with self._lock:
            if binding is None:
                self._bindings.pop(name, None)
            else:
                self._bindings[name] = binding
            for tap in self._taps.values():
                if name in (tap.described.name, base_name(tap.described.name)):
                    tap.bind(self._binding_of(tap.described.name))

    def _binding_of(self, name: str) -> Binding | None:
        # The caller holds the lock. A tap without a name of the user has its line's, `print@train_step:42`.
        return self._bindings.get(name) or self._bindings.get(base_name(name))

    def _deliver(self, message: Message) -> None:
        if not message.arrays:
            raise ValueError("a message of an exported program came without the description of its tap")
        description, *arrays = message.arrays
        self._hand_on(message, self._tap_of(description.tobytes()), arrays)

    def _deliver_shard(self, message: Message) -> None:
        if len(message.arrays) < 2:
            raise ValueError(
                "a message of shards of an exported program came without its shard record or the description of its tap"
            )
        record, description, *arrays = message.arrays
        tap = self._tap_of(description.tobytes(), says_share(record, message.arrays[1:]))
        # The record has an entry for the description too, because it is one of the arrays. It is cut out here.
        record = np.concatenate([record[:PLACES_FROM], record[PLACES_FROM + 2 :]])
        self._hand_on(message, tap, [record, *arrays])

    def _hand_on(self, message: Message, tap: BoundTap, arrays: list[Any]) -> None:
        if (
            tap.described.processes == FIRST_PROCESS
            and not self.is_first_process
            and not _is_shared(tap.described)
        ):
            return
        consumer = tap.consumer
        if tap.binding is None:
            consumer = self._registry.find(tap.described.consumer_id) or consumer
        try:
            consumer.sink(message._replace(consumer=consumer, arrays=arrays))
        except BaseException as error:
            raise DelegatedFailure(consumer, error) from error

    def _tap_of(self, description: bytes, is_shared: bool = False) -> BoundTap:
        # A program may run on devices of several processes that was exported on those of one. Its records say it.
        key = description, is_shared
        with self._lock:
            tap = self._taps.get(key)
            if tap is None:
                described = TapDescriptor.unpack(description)
                if is_shared:
                    described = replace(described, shards="some")
                try:
                    tap = self._make_tap(described, self._binding_of(described.name))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise ValueError(
                        f"the exported tap {described.name!r} (exported from {described.source_line}) is described as "
                        f"of the kind {described.kind!r} with params that do not go with it: {error!r}"
                    ) from error
                if len(self._taps) >= MAX_TAPS:
                    self._forget_one()
                self._taps[key] = tap
            else:
                self._taps.move_to_end(key)
            return tap

    def _forget_one(self) -> None:
        # Drops the least recently used tap; one with incomplete values only if the 64 oldest taps all have some.
        oldest = list(itertools.islice(self._taps.items(), 64))
        idle = [key for key, tap in oldest if not tap.has_pending_values]
        del self._taps[idle[0] if idle else oldest[0][0]]
