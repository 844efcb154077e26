"""The loop that hands each message of a batch to its consumer's sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.errors import TapFunctionException
from hostcallback.receiver.messages import ArraysSink, Consumer, Message, Registry
from hostcallback.receiver.runtime.dispatch.dispatcher import Dispatcher
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sinks.tap import callback_sink, tap_sink
from hostcallback.receiver.sources.ring_batch import DecodedBatch
from hostcallback.receiver.wire.frame import Flags


class Calls:
    """Notes the calls that a dispatcher starts."""

    def __init__(self) -> None:
        """None was started."""
        self.started: list[Message] = []

    def start(self, message: Message, scope: Scope) -> None:
        """Notes one."""
        self.started.append(message)


class Device:
    """A dispatcher of one device, and what it reports."""

    def __init__(self) -> None:
        """It has no consumers."""
        self.registry, self.scope, self.calls = Registry(), Scope("test"), Calls()
        calls: Any = self.calls
        self.dispatcher = Dispatcher(
            self.registry, "cpu:0", "the device", self.scope, lambda token: None, calls
        )
        self.leases: list[Any] = []

    def register(self, consumer_id: int, sink: Any) -> Consumer:
        """Registers a consumer with a sink."""
        consumer = Consumer(consumer_id, "tap", "here.py:1", sink)
        self.leases.append(self.registry.lease(consumer))
        return consumer

    def deliver(self, ids: Sequence[int], flags: int = 0) -> None:
        """Delivers a batch with one message for each id, which holds its number."""
        items = [(each, flags, 10 + k, 0, 5, 0, (np.array(k),)) for k, each in enumerate(ids)]
        self.dispatcher.deliver(DecodedBatch(iter(items), 8 * len(ids), 1, 9 + len(ids), False))

    @property
    def stats(self) -> Any:
        """Its counts."""
        return self.scope.device_stats("cpu:0")


def unflatten(arrays: Sequence[Any]) -> Any:
    return arrays[0]


def arguments(arrays: Sequence[Any]) -> Any:
    return tuple(arrays), {}


SINKS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "tap": lambda function: tap_sink(function, {}, unflatten),
    "tap with values of the host": lambda function: tap_sink(
        lambda value, *, place: function(value), {"place": 3}, unflatten
    ),
    "callback": lambda function: callback_sink(function, arguments, ()),
}


@pytest.mark.parametrize("kind", SINKS)
def test_a_function_of_the_arrays_gets_them_without_a_message(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    sink = SINKS[kind](lambda value: got.append(int(value)))
    assert isinstance(sink, ArraysSink)
    sink(Message(Consumer(1, "tap", "", sink), [np.array(7)], 0, 0, 0, None, None))
    assert got == [7]
    monkeypatch.setattr(ArraysSink, "__call__", None)
    device = Device()
    device.register(1, sink)
    device.deliver([1, 1, 1])
    assert got == [7, 0, 1, 2]
    assert device.stats.delivered == 3
    assert device.scope.deferred.take() is None


def test_a_function_that_wants_the_device_or_the_transforms_gets_them() -> None:
    got: list[Any] = []
    device = Device()
    device.register(
        1, tap_sink(lambda value, *, device, transforms: got.append((device, transforms)), {}, unflatten)
    )
    device.deliver([1])
    assert got == [("the device", ())]


def test_a_function_of_the_arrays_that_fails_is_reported_with_its_message() -> None:
    def fail(value: Any) -> None:
        if value == 1:
            raise ValueError("no")

    device = Device()
    device.register(1, tap_sink(fail, {}, unflatten))
    device.deliver([1, 1, 1])
    error = device.scope.deferred.take()
    assert isinstance(error, TapFunctionException)
    (failure,) = error.failures
    assert (failure.device, failure.seq, failure.tap, str(failure.exception)) == ("cpu:0", 11, "tap", "no")
    assert (device.stats.delivered, device.stats.failed) == (3, 1)


def test_a_call_that_names_a_tap_is_started_as_one() -> None:
    device = Device()
    consumer = device.register(1, ArraysSink(lambda arrays: pytest.fail("delivered as a tap")))
    device.deliver([1], int(Flags.CALL))
    assert [(message.consumer, message.seq, message.arrays[0]) for message in device.calls.started] == [
        (consumer, 10, 0)
    ]


def test_a_sink_that_is_replaced_within_a_batch_gets_the_next_message() -> None:
    got: list[str] = []
    device = Device()

    def first(arrays: Any) -> None:
        got.append("first")
        consumer.sink = lambda message: got.append(f"second {message.seq}")

    consumer = device.register(1, ArraysSink(first))
    device.deliver([1, 1, 1])
    assert got == ["first", "second 11", "second 12"]


def test_messages_of_several_taps_and_of_one_that_becomes_known_find_their_own() -> None:
    got: list[int] = []
    device = Device()

    def one(arrays: Any) -> None:
        got.append(1)
        if got.count(1) == 2:
            device.register(3, ArraysSink(lambda arrays: got.append(3)))

    device.register(1, ArraysSink(one))
    device.register(2, ArraysSink(lambda arrays: got.append(2)))
    device.deliver([1, 2, 2, 3, 1, 3, 3, 2, 1])
    assert got == [1, 2, 2, 1, 3, 3, 2, 1]
    assert (device.stats.delivered, device.stats.unknown) == (8, 1)
