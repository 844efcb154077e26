"""Waits for the taps of a device whose tap function does not return: what ends them, and what they say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from hostcallback.receiver.errors import DeviceClaimedError, ReentrantWaitError, TapTimeoutError
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime import runtime as runtimes
from hostcallback.receiver.runtime.dispatch import gil_share
from hostcallback.receiver.runtime.dispatch.calls import CallsInPlace
from hostcallback.receiver.runtime.dispatch.scope import Scope, never_entered
from hostcallback.receiver.runtime.rules.admission import Admission
from hostcallback.receiver.runtime.runtime import Runtime, Supervisor
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.taplog.flight.recorder import SUFFIX
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from rings import TestRing
from threads import wait_for

WAIT_SEC = 20.0
DEVICE = "cpu:901"
PREFIX = encode_prefix(1, Flags.ORDERED, ())


class Stalled:
    """A device with a small queue and a tap `slow`, whose function returns when it may.

    Attributes:
        seen: what a function `on_message` has returned of each message, on the receiver thread.
    """

    def __init__(
        self, on_message: Callable[[Message], Any] = lambda message: None, capacity_bytes: int = 3 * 64
    ) -> None:
        self.runtime = Runtime()
        self.source = QueueSource(901, capacity_bytes)
        self.entered, self.leave = threading.Event(), threading.Event()
        self.seen: list[Any] = []

        def sink(message: Message) -> None:
            self.seen.append(on_message(message))
            self.entered.set()
            assert self.leave.wait(WAIT_SEC)

        self._lease = self.runtime.registry.lease(Consumer(1, "slow", "here.py:1 (f)", sink))
        self.receiver = self.runtime.start(DEVICE, DEVICE, lambda: self.source, CallsInPlace)

    def emit(self) -> None:
        self.source.emit(PREFIX, ())

    def stall(self) -> None:
        """Emits a message, and waits until its function runs."""
        self.emit()
        assert self.entered.wait(WAIT_SEC)

    def emitting(self) -> threading.Thread:
        """A thread that emits until an emission has to wait for room."""
        thread = threading.Thread(target=lambda: [self.emit() for _ in range(10)])
        thread.start()
        wait_for(lambda: self.source.counters().waiting_producers, "an emission that waits")
        return thread

    def close(self) -> None:
        self.leave.set()
        self.runtime.wait_delivered(deadline=perf_counter() + WAIT_SEC)
        assert self.receiver.stop(WAIT_SEC)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalled]:
    monkeypatch.setattr(runtimes, "POLL_SEC", 0.002)
    with closing(Stalled()) as device:
        yield device


def test_what_waits_is_told_with_its_tap_while_the_receiver_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(gil_share, "ALONE_SEC", -1.0)  # a pause before each message
    monkeypatch.setattr(
        gil_share.GilThrottle,
        "yield_gil",
        lambda share: told.append(device.receiver.describe_backlog()) or 0.0,
    )
    with closing(Stalled(lambda message: message.seq, capacity_bytes=1 << 16)) as device:
        device.stall()
        for _ in range(5):  # one batch
            device.emit()
        device.leave.set()
        device.runtime.wait_delivered(deadline=perf_counter() + WAIT_SEC)
        assert device.seen == list(range(6))
        assert device.receiver.describe_backlog() == ""
    assert told == [
        f"{left} message(s) of {DEVICE}, at the tap slow (here.py:1 (f))" for left in (5, 4, 3, 2, 1)
    ]


def test_a_wait_includes_what_a_rate_has_kept_and_gets_room_meanwhile(
    stalled: Stalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def latest_waits() -> bool:
        if stalled.seen:
            return False
        stalled.stall()
        return True

    table = stalled.runtime.rule_table
    table.admissions[1] = Admission()
    monkeypatch.setattr(table, "latest_waits", latest_waits)
    with pytest.raises(TapTimeoutError, match="tap slow"):
        stalled.runtime.wait_delivered(deadline=0.0)
    assert stalled.seen == [None]


def test_a_stalled_tap_ends_waits_and_is_named(stalled: Stalled) -> None:
    runtime = stalled.runtime
    before = runtime.progress()
    assert runtime.describe_backlog() == runtime.describe_wait() == ""
    assert not runtime.is_another_receiver_busy()
    runtime.wait_delivered(deadline=0.0, stall_sec=0.0)  # nothing to wait for
    stalled.stall()
    assert runtime.progress() != before
    assert runtime.progress() == runtime.progress()
    assert runtime.is_another_receiver_busy()
    assert not runtime.holds_programs()
    assert runtime.describe_backlog() == f"1 message(s) of {DEVICE}, at the tap slow (here.py:1 (f))"
    text = rf"device {DEVICE}: tap slow at here\.py:1 \(f\) has been running for 0\.\d s, 1 message\(s\) "
    with pytest.raises(TapTimeoutError, match=f"^{text}"):
        runtime.wait_delivered(stall_sec=0.0)
    with pytest.raises(TapTimeoutError, match=rf"^the time was up\. {text}"):
        runtime.wait_delivered([DEVICE], deadline=perf_counter(), stall_sec=WAIT_SEC)
    runtime.wait_delivered(["another device"], deadline=0.0)
    with pytest.raises(TapTimeoutError, match=f"^{text}"):
        runtime.check_stalled(0.0)
    runtime.check_stalled(None)
    runtime.check_stalled(WAIT_SEC)
    with pytest.raises(ZeroDivisionError):
        runtime.wait_delivered(look=lambda: 1 // 0)
    stalled.leave.set()
    runtime.wait_delivered(deadline=perf_counter() + WAIT_SEC)
    assert runtime.describe_backlog() == runtime.describe_wait() == ""
    assert not runtime.is_another_receiver_busy()


def test_a_receiver_that_is_left_waits_for_its_own_messages(stalled: Stalled) -> None:
    runtime, scope, other = stalled.runtime, Scope("one", made_at="here.py:7"), Scope("two")
    runtime.claim([DEVICE, "cpu:902"], scope)
    with pytest.raises(DeviceClaimedError, match=r"already has the receiver 'one' made at here\.py:7"):
        runtime.claim(["cpu:903", "cpu:902"], other)
    assert runtime.scope_of("cpu:903") is runtime.default_scope
    assert (runtime.scope_of(DEVICE), runtime.scope_of("cpu:902")) == (scope, scope)
    stalled.stall()
    runtime.release([DEVICE], other)  # which does not have it
    assert runtime.scope_of(DEVICE) is scope
    (row,) = runtime.stats(scope)
    assert (row.device, row.queued_messages, row.waiting_emissions) == (DEVICE, 1, 0)
    stalled.emit()
    stalled.source.emit(PREFIX, ())
    (row,) = runtime.stats(scope)
    assert (row.queued_messages, row.queued_bytes) == (3, 2 * len(PREFIX))
    assert runtime.stats(other) == []
    runtime.release([DEVICE, "cpu:902"], scope)
    with pytest.raises(TapTimeoutError, match="tap slow"):
        runtime.wait_closed([DEVICE], scope, 0.0)
    stalled.leave.set()
    runtime.wait_closed([DEVICE], scope, WAIT_SEC)
    (row,) = runtime.stats(scope)
    assert (row.delivered, row.queued_messages, row.queued_bytes) == (3, 0, 0)
    stalled.emit()
    runtime.wait_delivered()
    assert scope.stats[0].delivered == 3
    assert [(row.device, row.delivered) for row in runtime.totals()] == [(DEVICE, 4)]


def test_a_program_that_is_let_go_does_not_wait_for_room(stalled: Stalled) -> None:
    runtime = stalled.runtime
    stalled.stall()
    runtime.let_go(True)
    for _ in range(10):
        stalled.emit()
    assert stalled.source.counters().dropped == 8  # of ten, two find room
    assert not runtime.holds_programs()
    runtime.let_go(False)
    later = stalled.emitting()
    assert runtime.holds_programs()
    assert stalled.source.counters().dropped == 8
    stalled.leave.set()
    later.join(WAIT_SEC)
    assert not later.is_alive()


def test_a_tap_function_sees_its_own_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(message: Message) -> Any:
        runtime = device.runtime
        with pytest.raises(
            ReentrantWaitError, match=rf"^waiting for taps from a tap .* thread of {DEVICE} would"
        ):
            runtime.wait_delivered()
        with runtime.working():
            works = device.receiver.is_working
        return works, runtime.is_another_receiver_busy(), runtime.serves(threading.current_thread())

    with closing(Stalled(look)) as device:
        device.stall()
        assert device.seen == [(True, False, True)]
        with device.runtime.working():  # of another thread
            assert not device.receiver.is_working


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("no receiver", "because no receiver is open: put the training into with hcb.outfeed_receiver({W}):"),
        ("not entered", "because the outfeed_receiver made at here.py:9 is not entered: with receiver:"),
        ("no writers", "because the open receiver has no writers: give it outfeed_receiver({W})"),
        ("takes rest", None), ("batch sinks", None), ("flight", None), ("message sinks", None),
    ],
)  # fmt: skip
def test_metrics_that_nothing_writes_are_warned_of(
    why: str, told: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: Any = Scope("one", made_at="here.py:9")
    for key in [*never_entered]:
        monkeypatch.delitem(never_entered, key)
    with closing(Stalled(lambda message: device.runtime.warn_of_unwritten(message))) as device:
        runtime: Any = device.runtime
        if why == "not entered":
            monkeypatch.setitem(never_entered, scope, ("outfeed_receiver", scope.made_at))
        elif why == "no writers":
            runtime.claim([DEVICE], scope)
        elif why == "flight":
            monkeypatch.setattr(runtime, "flight", object())
        elif why != "no receiver":
            name = why.replace(" ", "_")
            monkeypatch.setattr(runtime.default_scope, name, (object(),) if why == "batch sinks" else True)
            if why != "takes rest":
                device.receiver.dispatcher.feed.sinks = ()
        with caplog.at_level(logging.WARNING):
            device.stall()
        assert device.seen == [told is not None]
    written = (told or "").replace("{W}", "writers=[hcb.csv('metrics.csv')]")
    expected = [f"nothing writes the values of hcb.metrics at here.py:1 (f), {written}"] if told else []
    assert caplog.messages == expected


def test_on_other_threads_nothing_is_said_of_unwritten_metrics(stalled: Stalled) -> None:
    message = Message(Consumer(1, "slow", "here.py:1 (f)", print), [], 0, 0, 0, DEVICE, None)
    assert not stalled.runtime.warn_of_unwritten(message)


@pytest.mark.native_only
def test_a_flight_recorder_keeps_the_rings_of_devices_before_and_after_it(tmp_path: Path) -> None:
    runtime = Runtime()
    rings = [TestRing(RingConfig(capacity_bytes=4096)) for _ in range(2)]
    first = runtime.start("cpu:902", None, lambda: rings[0].source)
    runtime.record_flight(tmp_path)
    assert runtime.flight is not None
    folder = runtime.flight.folder
    runtime.record_flight(tmp_path / "another")
    second = runtime.start("cpu:903", None, lambda: rings[1].source)
    kept = sorted(path.name for path in folder.iterdir() if path.suffix == SUFFIX)
    assert kept == [f"cpu-902{SUFFIX}", f"cpu-903{SUFFIX}"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    for receiver in (first, second):
        assert receiver.stop(WAIT_SEC)
    runtime.remove_files()
    assert not folder.exists()


class Library:
    """Tells the supervisor of events, then ends its thread."""

    def __init__(self, *events: tuple[int, int] | None) -> None:
        self._events = list(events)

    def hcb_supervise_wait(self, timeout: int, event: Any) -> int:
        if not self._events:
            raise SystemExit
        found = self._events.pop(0)
        if found is None:
            return 0
        event._obj.kind, event._obj.device = found
        return 1

    def hcb_gpu_ring(self, device: int) -> int:
        return 7


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a supervisor, which gets some events and ends; `wait` is called meanwhile."""
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.set())

    def run(runtime: Any, *events: tuple[int, int] | None, wait: Callable[[], Any] = lambda: None) -> None:
        monkeypatch.setattr(runtimes.native, "load", lambda: Library(*events))
        Supervisor(runtime)
        wait()
        assert ended.wait(WAIT_SEC)

    return run


Supervise = Callable[..., None]


def test_the_supervisor_warns_once_of_a_slow_tap(
    stalled: Stalled, supervise: Supervise, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "WARN_AFTER_SEC", 0.004)
    stalled.stall()
    thread = stalled.emitting()
    looks: list[int] = []
    receivers = stalled.runtime.receivers

    def looked(names: Any = None) -> Any:
        looks.append(len(caplog.messages))
        return receivers(names)

    monkeypatch.setattr(stalled.runtime, "receivers", looked)

    def wait() -> None:
        wait_for(lambda: looks and looks[-1], "the warning")
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 3, "more looks")
        stalled.leave.set()  # no emission waits any more

    supervise(stalled.runtime, (native.EVENT_STALL, 901), wait=wait)
    thread.join(WAIT_SEC)
    (warning,) = caplog.messages
    assert warning.startswith(
        f"the device waits for a slow tap: device {DEVICE}: tap slow at here.py:1 (f) has"
    )


def test_the_supervisor_tells_of_memory_that_is_not_pinned_and_survives_its_failures(
    supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise ValueError("planted")

    broken = SimpleNamespace(receivers=fail)
    events = (native.EVENT_STALL, 3), None, (native.EVENT_NOT_PINNED, 2)
    supervise(broken, *events)
    failure, warning = caplog.messages
    assert failure == "the supervisor could not look at the stall of device 3"
    assert warning.startswith("the GPU driver could not pin memory for the taps of GPU 7: ")
