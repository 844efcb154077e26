"""Calls whose host functions run on the threads of their programs: results, failures, and what other threads see."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.errors import CallFailedError, ReentrantWaitError, TapTimeoutError
from hostcallback.receiver.failures.deferred_errors import FailureOfProgram
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.runtime import runtime as runtimes
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.calls import CallsInPlace, ThreadFor
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.runtime import Runtime
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.wire.array_types import ALIGNMENT, ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from threads import in_another_thread, wait_for

WAIT_SEC = 20.0
DEVICE = "cpu:900"


class Program:
    """Programs of one device, which call host functions, and the receiver of the device."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.source = QueueSource(900)
        self.receiver: DeviceReceiver = self.runtime.start(DEVICE, DEVICE, lambda: self.source, CallsInPlace)
        self._leases: list[Any] = []

    def registered(self, consumer_id: int, sink: Callable[[Message], Any]) -> None:
        of = Consumer(consumer_id, f"f{consumer_id}", f"here.py:{consumer_id} (f)", sink)
        self._leases.append(self.runtime.registry.lease(of))

    def ask(self, consumer_id: int, *arrays: Any) -> list[Any]:
        """Calls a host function."""
        found = [*map(np.asarray, arrays)]
        prefix = encode_prefix(
            consumer_id, Flags.CALL | Flags.ORDERED, [ArraySpec.of(each.dtype, each.shape) for each in found]
        )
        assert isinstance(self.receiver.calls, CallsInPlace)
        return self.receiver.calls.ask(prefix, found)

    def close(self) -> None:
        assert self.receiver.stop(WAIT_SEC)

    @property
    def scope(self) -> Scope:
        return self.receiver.scope


@pytest.fixture
def program() -> Iterator[Program]:
    with closing(Program()) as made:
        yield made


class Blocked:
    """A host function that runs until it may leave."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, message: Message) -> list[Any]:
        self.entered.set()
        assert self.leave.wait(WAIT_SEC)
        return [np.int32(1)]


def test_a_host_function_runs_on_the_thread_of_its_program(program: Program) -> None:
    threads: list[threading.Thread] = []

    def double(message: Message) -> list[Any]:
        threads.append(threading.current_thread())
        return [2 * message.arrays[0], message.arrays[1].sum()]

    program.registered(5, double)
    for number in range(3):
        first, second = program.ask(5, np.float32(number), np.arange(4))
        assert (first, second) == (2 * number, 6)
    assert threads == [threading.current_thread()] * 3
    (row,) = program.scope.stats
    assert (row.delivered, row.failed, row.unknown) == (3, 0, 0)
    assert row.tap_sec > 0
    assert program.receiver.calls.running == {}


def test_large_arrays_of_calls_are_aligned_and_small_ones_whole(program: Program) -> None:
    sizes = [1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3, 1 << 17]
    given = [np.arange(size, dtype=np.uint8) for size in sizes] + [np.arange(60_000.0).reshape(200, 300)]
    seen: list[Any] = []
    program.registered(5, lambda message: seen.extend(message.arrays) or [])
    program.ask(5, *given)
    for array, wanted in zip(seen, given, strict=True):
        np.testing.assert_array_equal(array, wanted)
        assert (array.dtype, array.flags.c_contiguous) == (wanted.dtype, True)
        assert array.nbytes < 1 << 16 or array.ctypes.data % ALIGNMENT == 0
        array[...] = 0  # a sink may change its arrays


def test_a_call_of_an_unknown_consumer_fails(program: Program) -> None:
    told = "hostcallback: a call is for consumer 0x0000000000000006, which this process does not know"
    with pytest.raises(CallFailedError, match=f"^{told}"):
        program.ask(6, np.float32(1))
    program.registered(6, lambda message: [message.arrays[0]])
    assert program.ask(6, np.float32(1)) == [1]
    (row,) = program.scope.stats
    assert (row.delivered, row.unknown) == (1, 1)


def test_a_host_function_that_raises_fails_its_program_and_the_next_barrier(program: Program) -> None:
    def fail(message: Message) -> list[Any]:
        raise ValueError("planted")

    program.registered(5, fail)
    with pytest.raises(CallFailedError, match=r"^hostcallback: a call failed: (.|\n)*ValueError: planted"):
        program.ask(5, np.float32(1))
    (row,) = program.scope.stats
    assert (row.delivered, row.failed) == (1, 1)
    error = program.scope.deferred.take()
    assert error is not None
    assert "planted" in str(error)
    assert "f5" in str(error)


def test_a_failure_of_the_program_alone_is_no_matter_of_a_barrier(program: Program) -> None:
    def fail(message: Message) -> list[Any]:
        raise FailureOfProgram(KeyError("planted"))

    program.registered(5, fail)
    with pytest.raises(CallFailedError, match="KeyError: 'planted'"):
        program.ask(5, np.float32(1))
    assert program.scope.deferred.take() is None
    assert program.scope.stats[0].failed == 1


def test_a_barrier_waits_for_a_host_function_and_names_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "POLL_SEC", 0.002)
    slow, runtime, results = Blocked(), program.runtime, []
    program.registered(5, slow)
    caller = threading.Thread(target=lambda: results.extend(program.ask(5, np.float32(1))))
    caller.start()
    assert slow.entered.wait(WAIT_SEC)
    longest = program.receiver.calls.longest()
    assert longest is not None
    assert longest[0].name == "f5"
    assert longest[1] > 0
    assert runtime.holds_programs()
    assert runtime.serves(caller)
    assert not runtime.serves(threading.current_thread())
    assert re.match(r".*f5", runtime.describe_wait())
    with pytest.raises(TapTimeoutError, match=r"^the time was up\. .*f5"):
        runtime.wait_delivered(deadline=0.0)
    with pytest.raises(TapTimeoutError, match=r"f5"):
        runtime.wait_delivered(stall_sec=0.0)
    looks: list[int] = []

    def look() -> None:
        looks.append(len(results))
        if len(looks) == 3:
            slow.leave.set()

    runtime.wait_delivered(look=look, stall_sec=WAIT_SEC)
    assert looks[:3] == [0, 0, 0]
    caller.join(WAIT_SEC)
    assert results == [1]
    assert not runtime.holds_programs()
    assert not runtime.serves(caller)
    assert program.receiver.calls.longest() is None
    assert runtime.describe_wait() == ""


def test_the_call_that_has_run_for_longest_is_named(program: Program) -> None:
    first, second = Blocked(), Blocked()
    program.registered(5, first)
    program.registered(6, second)
    callers = [threading.Thread(target=program.ask, args=(number, np.float32(1))) for number in (5, 6)]
    for caller, sink in zip(callers, (first, second), strict=True):
        caller.start()
        assert sink.entered.wait(WAIT_SEC)
    calls = program.receiver.calls
    assert (found := calls.longest()) is not None
    assert found[0].name == "f5"
    assert [getattr(calls.running_on(caller), "name", None) for caller in callers] == ["f5", "f6"]
    assert calls.running_on(threading.current_thread()) is None
    numbers = [*calls.running]
    assert not calls.wait(numbers, 0.0)
    first.leave.set()
    callers[0].join(WAIT_SEC)
    assert (found := calls.longest()) is not None
    assert found[0].name == "f6"
    assert calls.wait(numbers[:1], 0.0)
    assert not calls.wait(numbers, 0.0)
    ends = threading.Thread(target=lambda: (wait_for(lambda: calls._waiters), second.leave.set()))
    ends.start()
    assert calls.wait(numbers, WAIT_SEC)
    for thread in (*callers, ends):
        thread.join(WAIT_SEC)


@pytest.mark.parametrize("on_another_thread", [False, True])
def test_a_host_function_that_waits_for_taps_is_told_to_do_it_elsewhere(
    program: Program, on_another_thread: bool
) -> None:
    told: list[str] = []

    def wait() -> None:
        try:
            program.runtime.wait_delivered()
        except ReentrantWaitError as error:
            told.append(str(error))

    def sink(message: Message) -> list[Any]:
        if on_another_thread:
            thread = ThreadFor(wait)
            assert thread.name == threading.current_thread().name
            thread.start()
            thread.join(WAIT_SEC)
        else:
            wait()
        return []

    program.registered(5, sink)
    program.ask(5, np.float32(1))
    assert told == [
        "waiting for taps from f5, the host function of the call at here.py:5 (f), would wait for the program that "
        "waits for it: do it on the thread that dispatches the computations"
    ]
    wait()  # the call is over
    assert len(told) == 1


def test_calls_that_are_closed_fail(program: Program) -> None:
    program.registered(5, lambda message: [])
    program.runtime.close_calls("the process ends")
    for _ in range(2):
        with pytest.raises(CallFailedError, match=r"^the process ends$"):
            program.ask(5, np.float32(1))
    program.runtime.wait_delivered()


def test_a_call_waits_for_the_messages_before_it(program: Program) -> None:
    order: list[str] = []
    slow = Blocked()

    def tap(message: Message) -> None:
        slow(message)
        order.append("tap")

    program.registered(5, tap)
    program.registered(6, lambda message: order.append("call") or [])
    program.source.emit(encode_prefix(5, Flags.ORDERED, ()), ())
    assert slow.entered.wait(WAIT_SEC)
    caller = threading.Thread(target=program.ask, args=(6, np.float32(1)))
    caller.start()
    wait_for(lambda: program.source.counters().emitted == 2, "the call")
    assert order == []
    slow.leave.set()
    caller.join(WAIT_SEC)
    assert order == ["tap", "call"]
    in_another_thread(program.runtime.wait_delivered)
