"""Values of several taps come in the order of the program, also after failures; turns in the order of tickets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from shard_stories import Gate, in_thread, messages_of, scalar_program, scan

from hostcallback.receiver.errors import IncompleteValueError, TapFailure
from hostcallback.receiver.failures.deferred_errors import DeferredErrors, MultipleFailures
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding import sinks as shards
from hostcallback.receiver.sinks.sharding.launches import TicketQueue
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from python_process import run_python
from threads import wait_for


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_value_waits_for_those_completed_before_it_and_no_longer(error: BaseException | None) -> None:
    program = scalar_program(2)
    log: list[str] = []
    slow = Gate(log, "slow", error)
    first, second = AssemblingSink(slow), AssemblingSink(lambda message: log.append("next"))
    raised: list[BaseException | None] = []

    def complete_first() -> None:
        try:
            first(program.message(1, 0, 0))
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    first(program.message(1, 0, 1))
    second(program.message(1, 0, 0))
    a = in_thread(complete_first)
    assert slow.entered.wait(60)
    b = in_thread(lambda: second(program.message(1, 0, 1)))
    wait_for(lambda: len(shards.turns) == 2)
    # A device whose shards complete nothing goes on meanwhile, on this thread.
    for message in messages_of(program, 0, scan(20, run_id=2)):
        first(message)
        second(message)
    assert b.is_alive()
    slow.open.set()
    a.join()
    b.join()
    assert log == ["slow begins", "slow ends", "next"]
    assert raised == [error]
    assert len(shards.turns) == 0


@pytest.mark.usefixtures("impatient_threads")
def test_taps_of_one_program_are_called_in_program_order() -> None:
    program = scalar_program(4)
    called: list[tuple[str, int]] = []
    running = threading.Lock()

    def tap(name: str) -> Callable[[Message], None]:
        def call(message: Message) -> None:
            assert running.acquire(blocking=False), "two taps ran at once"
            called.append((name, message.run_id))
            running.release()

        return call

    sinks = {name: AssemblingSink(tap(name)) for name in "abc"}

    def device(partition: int) -> Callable[[], None]:
        def run() -> None:
            for run_id in range(150):
                for sink in sinks.values():
                    sink(program.message(run_id, 0, partition))

        return run

    threads = [in_thread(device(partition)) for partition in program.partitions]
    for thread in threads:
        thread.join()
    assert called == [(name, run_id) for run_id in range(150) for name in "abc"]


def test_a_failing_tap_does_not_hide_discarded_values() -> None:
    program = scalar_program(2)

    def fail(message: Message) -> None:
        raise KeyError("no")

    sink = AssemblingSink(fail)
    for occurrence in (0, 1, 2, 3):
        sink(program.message(1, occurrence, 0))
    with pytest.raises(MultipleFailures) as info:
        sink(program.message(1, 3, 1))
    assert [type(error) for error in info.value.exceptions] == [KeyError, IncompleteValueError]
    deferred = DeferredErrors()
    deferred.add_failure(TapFailure(info.value, "tap", "here:1 (f)", "cpu:1", 7))
    report = deferred.take()
    assert report is not None
    assert [type(failure.exception) for failure in report.failures] == [KeyError]
    (incomplete,) = [error for error in report.exceptions if isinstance(error, IncompleteValueError)]
    assert incomplete.count == 3
    assert str(incomplete).startswith(
        "3 value(s) of arrays that lie on several devices were given up, 3 of the tap tap at here:1 (f)"
    )


def test_however_many_values_are_given_up_one_error_tells() -> None:
    deferred = DeferredErrors(max_kept=2)
    for count, tap in ((1, "a"), (5, "b"), (2, "a")) * 50:
        deferred.add_failure(TapFailure(IncompleteValueError("", count), tap, "x:1 (f)", "cpu:0", 0))
    report = deferred.take()
    assert report is not None
    (error,) = report.exceptions
    assert isinstance(error, IncompleteValueError)
    assert error.count == 400
    assert "250 of the tap b at x:1 (f), 150 of the tap a at x:1 (f)" in str(error)
    assert not report.suppressed
    assert deferred.take() is None


def test_turns_come_in_the_order_of_the_tickets_also_when_some_are_given_back_early() -> None:
    turns = TicketQueue()
    first, second, third = (turns.issue() for _ in range(3))
    log: list[str] = []

    def wait(ticket: object, name: str) -> None:
        turns.wait(ticket)
        log.append(name)

    thread = in_thread(lambda: wait(third, "third"))
    wait(first, "first")
    turns.release(second)
    assert thread.is_alive()
    turns.release(first)
    thread.join()
    assert log == ["first", "third"]
    turns.release(third)
    assert len(turns) == 0


def test_a_forked_child_does_not_wait_for_turns_of_its_parent() -> None:
    program = """if True:
        import os, sys
        import numpy as np
        from hostcallback.receiver.messages import Message
        from hostcallback.receiver.sinks.sharding.shard_record import shard_record
        from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink, turns

        def hand_on(name):
            record = np.array(shard_record([], shards=1, group=0, partition=0), np.int64)
            AssemblingSink(lambda message: print(name, flush=True))(Message(None, [record], 0, 0, 0, "d", None))

        mine, others = turns.issue(), turns.issue()
        pid = os.fork()  # as a tap function may
        if pid == 0:
            turns.release(mine)
            hand_on("child")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        turns.release(mine)
        turns.release(others)
        hand_on("parent")
    """
    done = run_python("-c", program, timeout_sec=60)
    assert (done.stdout, done.stderr) == ("child\nparent\n", "")
