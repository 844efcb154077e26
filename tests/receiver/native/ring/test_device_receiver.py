"""A receiver thread on a real ring: damage, undecodable frames and drops are counted, and the stream goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hostcallback.receiver.errors import LostMessagesError, TapFunctionException
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope, ScopeSinks
from hostcallback.receiver.runtime.runtime import Runtime
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.taplog.writing.recorder import record
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import read
from rings import TestRing

pytestmark = pytest.mark.native_only

SMALL = 192


class Listener:
    """A consumer that can be held, and the receiver that delivers to it."""

    def __init__(self, ring: Any, *batch_sinks: Any) -> None:
        self.seen: list[bytes] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.registry = Registry()
        self.lease = self.registry.lease(Consumer(1, "listener", "here.py:1 (f)", self.take))
        self.scope = Scope("test")
        self.scope.batch_sinks = batch_sinks
        self.receiver = DeviceReceiver("cpu:900", None, ring.source, self.registry, self.scope)

    def take(self, message: Any) -> None:
        self.entered.set()
        self.gate.wait()
        self.seen.append(bytes(message.arrays[0]))

    def drained(self, ring: Any) -> None:
        self.gate.set()
        assert self.receiver.wait_consumed(ring.counters.emitted, 20)

    def errors(self) -> list[Exception]:
        error = self.scope.deferred.take()
        assert isinstance(error, TapFunctionException)
        return list(error.exceptions)


@pytest.fixture
def held(make_ring: Any) -> Any:
    """A ring and a listener that is inside its first message."""
    ring = make_ring(policy=Policy.DROP_NEWEST)
    listener = Listener(ring)
    ring.send(b"first")
    assert listener.entered.wait(20)
    yield ring, listener
    listener.gate.set()
    assert listener.receiver.stop(20)


def test_a_corrupted_frame_is_reported_and_the_frames_around_it_are_delivered(held: Any) -> None:
    ring, listener = held
    for i in range(5):
        ring.send(bytes([i]))
    ring.corrupt(3 * SMALL, b"XYZ")  # the third of them
    listener.drained(ring)
    assert listener.seen == [b"first", b"\0", b"\1", b"\3", b"\4"]
    (error,) = listener.errors()
    assert isinstance(error, LostMessagesError)
    assert "1 message(s) lost: damaged stream on cpu:900" in str(error)
    assert "bad magic" in str(error)
    ring.send(b"later")
    listener.drained(ring)
    assert listener.seen[-1] == b"later"
    assert listener.scope.stats[0].dropped == 0


def test_a_recorder_is_told_of_damage(make_ring: Any, tmp_path: Path) -> None:
    ring = make_ring(policy=Policy.DROP_NEWEST)
    recorder = record(tmp_path / "log")
    listener = Listener(ring, recorder)
    ring.send(b"first")
    assert listener.entered.wait(20)
    ring.send(b"damaged")
    ring.corrupt(SMALL, b"XYZ")
    listener.drained(ring)
    assert listener.receiver.stop(20)
    recorder.close()
    assert listener.errors()
    _, (lost,), _ = read(tmp_path / "log")
    assert lost.lost.reason.startswith("damaged stream on cpu:900")
    assert lost.lost.messages == 1


def test_metadata_that_contradicts_its_payload_is_reported_and_the_stream_goes_on(held: Any) -> None:
    ring, listener = held
    ring.send(b"good")
    ring.send(b"bad!")
    ring.send(b"more")
    ring.corrupt(2 * SMALL + 64, b"\x91\x92\x06\x91\x09")  # nine elements, not four
    listener.drained(ring)
    assert listener.seen == [b"first", b"good", b"more"]
    (error,) = listener.errors()
    assert "undecodable frame on cpu:900" in str(error)


def test_a_truncated_message_without_its_shapes_is_reported_and_the_stream_goes_on(held: Any) -> None:
    ring, listener = held
    ring.send(b"good")
    ring.send(b"bad!", flags=Flags.TRUNCATED)
    ring.send(b"more")
    listener.drained(ring)
    assert listener.seen == [b"first", b"good", b"more"]
    (error,) = listener.errors()
    assert "undecodable frame on cpu:900" in str(error)
    assert "1 message(s) lost" in str(error)


def test_a_fully_overwritten_ring_hangs_no_thread(held: Any) -> None:
    ring, listener = held
    for i in range(8):
        ring.send(bytes([i]))
    ring.corrupt(SMALL, bytes(4096 - SMALL))
    listener.drained(ring)
    assert listener.seen == [b"first"]
    assert any(isinstance(error, LostMessagesError) for error in listener.errors())
    ring.send(b"after")
    listener.drained(ring)
    assert listener.seen == [b"first", b"after"]


def assert_drops_are_counted(ring: Any, listener: Listener, results: list[int], before: int) -> None:
    """After sends with these results and `before` delivered messages: one more arrives, and the counters are right."""
    dropped = results.count(native.DROPPED)
    assert dropped > 0
    listener.drained(ring)
    while ring.send(b"last") == native.DROPPED:
        pass
    listener.drained(ring)
    (stats,) = listener.scope.stats
    assert stats.dropped == dropped
    assert stats.delivered == before + len(results) - dropped + 1


def test_drops_show_in_the_statistics_of_the_scope(held: Any) -> None:
    ring, listener = held
    results = [ring.send(bytes([i])) for i in range(40)]
    assert_drops_are_counted(ring, listener, results, before=1)


def test_drops_are_counted_in_addition_to_an_undecodable_message(held: Any) -> None:
    ring, listener = held
    ring.send(b"good")
    ring.send(b"bad!")
    ring.corrupt(2 * SMALL + 64, b"\x91\x92\x06\x91\x09")
    results = [ring.send(b"more") for _ in range(40)]
    assert_drops_are_counted(ring, listener, results, before=2)


def test_the_scope_changes_exactly_at_the_sentinel(held: Any) -> None:
    ring, listener = held
    second = Scope("second")
    ring.send(b"one")
    listener.receiver.switch(second)
    ring.send(b"two")
    ring.send(b"three")
    listener.drained(ring)
    assert listener.scope.stats[0].delivered == 2
    assert second.stats[0].delivered == 2
    assert listener.scope.wait_closed("cpu:900", 20)
    assert second.has_open_devices
    assert not listener.scope.has_open_devices


def test_a_stopped_receiver_has_delivered_its_queue(ring: TestRing) -> None:
    listener = Listener(ring)
    listener.gate.set()
    for i in range(10):
        ring.send(bytes([i]))
    assert listener.receiver.stop(20)
    assert listener.seen == [bytes([i]) for i in range(10)]
    assert not listener.receiver.thread.is_alive()


def test_the_taps_of_a_device_are_counted_though_it_is_used_later_than_that_is_asked_for(
    ring: TestRing,
) -> None:
    seen: list[str] = []
    runtime = Runtime()
    runtime.count_taps(True)
    runtime.observe(ScopeSinks([lambda message: seen.append(message.consumer.name)]), True)
    receiver = runtime.start("cpu:901", None, lambda: ring.source)
    line = "here.py:1 (f)"
    about = TapDescriptor("counted", line, 1, "tap", {}, {}, (), ["array"], None, "global")
    lease = runtime.registry.lease(Consumer(1, "counted", line, lambda message: None, describe=lambda: about))
    ring.send(b"one")
    ring.send(b"two")
    assert receiver.wait_consumed(ring.counters.emitted, 20)
    assert receiver.dispatcher.tap_counters is not None
    counted = [(each.name, counts.messages) for each, counts in receiver.dispatcher.tap_counters.snapshot()]
    assert (counted, seen) == ([("counted", 2)], ["counted"] * 2)
    assert receiver.stop(20)
    del lease
